"""Makes a folder as transformers saves models, in bf16, of a GGUF file: convert_gguf.py FILE.gguf FOLDER

Needs torch, transformers and gguf (python/tests/requirements-gguf.txt)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from gguf import GGUFReader


def special_token(reader: GGUFReader, name: str) -> str | None:
    field = reader.fields.get(f"tokenizer.ggml.{name}_token_id")
    return None if field is None else reader.fields["tokenizer.ggml.tokens"].contents(int(field.contents()))


def convert(file: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # transformers takes the end of a text for that of an answer; the file says which one it is.
    reader = GGUFReader(file)
    for name in ("bos", "eos", "pad"):
        token = special_token(reader, "padding" if name == "pad" else name)
        if token is not None:
            setattr(tokenizer, f"{name}_token", token)
            number = tokenizer.convert_tokens_to_ids(token)
            setattr(model.config, f"{name}_token_id", number)
            setattr(model.generation_config, f"{name}_token_id", number)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # A model that was read from GGUF refuses to be saved; one of the same weights does not.
    plain = type(model)(model.config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: convert_gguf.py FILE.gguf FOLDER")
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
