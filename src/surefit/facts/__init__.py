"""Facts about a model, a machine, a data set and an environment, found without torch and without guessing.

`model` reads config.json and safetensors headers, `hardware` asks the operating system and the GPU driver, `dataset`
samples rows, `environment` reads tokens and network settings, `memory_formula` is the closed form of the memory of
training.
"""
