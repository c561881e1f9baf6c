"""A model as a directory in Hugging Face's layout."""

import json
import os
import pathlib
import struct

import torch


def shards_of(tensors, most_bytes):
    """Tensors in groups of at most so many bytes, but for what is larger alone."""
    groups, size = [{}], 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > most_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups


def write_whole(path, data):
    """Written aside and renamed: a reader finds the old file or the new one."""
    aside = path.with_name(path.name + ".new")
    aside.write_bytes(data)
    os.replace(aside, path)


def safetensors(tensors):
    """The bytes of a .safetensors file of bf16 tensors."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = (memoryview(tensor.view(dtype=torch.int16).numpy()).tobytes() for tensor in tensors.values())
    return struct.pack("<Q", len(text)) + text + b"".join(raw)


def save(directory, config, tensors, shard_bytes):
    """Writes config.json and the weights, in files of at most `shard_bytes`."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards = shards_of(tensors, shard_bytes)
    if len(shards) == 1:
        write_whole(directory / "model.safetensors", safetensors(shards[0]))
    else:
        places = {}
        for i, shard in enumerate(shards):
            name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            write_whole(directory / name, safetensors(shard))
            places |= dict.fromkeys(shard, name)
        index = {"metadata": {"total_size": sum(each.nbytes for each in tensors.values())}, "weight_map": places}
        write_whole(directory / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
    write_whole(directory / "config.json", json.dumps(config, indent=1).encode())
