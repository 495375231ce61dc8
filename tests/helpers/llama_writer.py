"""A converter to GGUF in the place of llama.cpp's, as the text of a program."""

from __future__ import annotations

WRITER = """
import json, sys
from pathlib import Path
import gguf
from safetensors.torch import load_file
source, out = Path(sys.argv[1]), sys.argv[3]
config = json.loads((source / "config.json").read_text())
writer = gguf.GGUFWriter(out, "llama")
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_block_count(config["num_hidden_layers"])
writer.add_feed_forward_length(config["intermediate_size"])
heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
writer.add_head_count(heads)
writer.add_head_count_kv(shared)
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_vocab_size(config["vocab_size"])
writer.add_rope_freq_base(10000.0)
writer.add_rope_dimension_count(config["hidden_size"] // heads)
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
for name, tensor in tensors.items():
    for part, count in (("q_proj", heads), ("k_proj", shared)):
        if part in name:  # llama.cpp has the halves of a rotation beside each other
            shape = tensor.shape
            tensor = tensor.reshape(count, 2, shape[0] // count // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.float().numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
"""What llama.cpp's converter does of a Llama, without its tokenizer, through llama.cpp's own library."""
