"""Facts: what a model, a machine, a data set and an environment are, found without torch and without guessing.

`model` reads config.json and safetensors headers, `hardware` asks the operating system and the GPU driver, `dataset`
samples rows, `environment` looks at tokens and network settings, `budget` is the closed form of what all that costs.
"""
