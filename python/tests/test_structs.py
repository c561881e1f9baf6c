"""The ctypes structs are those of sluice.h: a C program says where the compiler puts every field."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest
import sluice
from sluice import _library, _structs as structs

HEADER = Path(__file__).parents[2] / "include" / "sluice.h"
MIRRORED = {
    "sluice_tensor": structs.Tensor,
    "sluice_engine_options": structs.EngineOptions,
    "sluice_engine_sizes": structs.EngineSizes,
    "sluice_bucket": structs.Bucket,
    "sluice_attend_args": structs.AttendArgs,
    "sluice_plan_item": structs.PlanItem,
    "sluice_admission_options": structs.AdmissionOptions,
    "sluice_request": structs.Request,
    "sluice_turn_item": structs.TurnItem,
    "sluice_admission_use": structs.AdmissionUse,
    "sluice_stats": structs.Stats,
    "sluice_memory": structs.Memory,
    "sluice_sequence_memory": structs.SequenceMemory,
    "sluice_audit": structs.Audit,
    "sluice_head_audit": structs.HeadAudit,
}


def fields(struct: type[ctypes.Structure], name: str = "", start: int = 0) -> list[tuple[str, int, int]]:
    """Every field's name in C, offset and size, nested ones too."""
    found = []
    for field, kind in struct._fields_:
        at = getattr(struct, field)
        if issubclass(kind, ctypes.Structure):
            found += fields(kind, f"{name}{field}.", start + at.offset)
        found.append((f"{name}{field}", start + at.offset, at.size))
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    """What the compiler says of every struct, field and constant."""
    lines = []
    for name, struct in MIRRORED.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _, _ in fields(struct):
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                         f'sizeof((({name}*)0)->{field}));')
    for constant in constants():
        lines.append(f'printf("{constant} %d\\n", (int){constant});')
    folder = tmp_path_factory.mktemp("structs")
    source, program = folder / "structs.c", folder / "structs"
    source.write_text('#include <stddef.h>\n#include <stdio.h>\n#include "sluice.h"\nint main(void) {\n'
                      + "\n".join(lines) + "\nreturn 0;\n}\n")
    compiler = os.environ.get("SLUICE_TEST_CC", "cc")
    subprocess.run([compiler, "-std=c99", f"-I{HEADER.parent}", str(source), "-o", str(program)], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {words[0]: tuple(map(int, words[1:])) for words in map(str.split, said.splitlines())}


def constants() -> dict[str, int]:
    statuses = {f"SLUICE_{name}": kind.status for name, kind in (
        ("INVALID_ARGUMENT", sluice.InvalidArgument), ("OUT_OF_CAPACITY", sluice.OutOfCapacity),
        ("UNSUPPORTED", sluice.Unsupported), ("NOT_FOUND", sluice.NotFound), ("CORRUPT", sluice.Corrupt),
        ("IO", sluice.ReadWriteError), ("DEVICE", sluice.DeviceError), ("TIMEOUT", sluice.Timeout),
        ("INTERNAL", sluice.InternalError))}
    from sluice.options import _CHOICES
    words = {"kv_dtype": "SLUICE_", "prefill_mode": "SLUICE_PREFILL_",
             "placement": "SLUICE_PLACE_", "handover": "SLUICE_HANDOVER_"}
    choices = {prefix + word.upper(): number for name, prefix in words.items()
               for number, word in enumerate(_CHOICES[name])}
    features = {f"SLUICE_BUCKET_{each.name}": int(each) for each in sluice.Features if each}
    return {**statuses, **choices, **features, "SLUICE_ABI_VERSION": structs.ABI_VERSION,
            "SLUICE_DEVICE_CPU": structs.DEVICE_CPU, "SLUICE_DEVICE_CUDA": structs.DEVICE_CUDA,
            "SLUICE_DEVICE_CUDA_HOST": structs.DEVICE_CUDA_HOST, "SLUICE_TYPE_FLOAT": structs.TYPE_FLOAT,
            "SLUICE_TYPE_BFLOAT": structs.TYPE_BFLOAT}


@pytest.mark.parametrize("name", MIRRORED)
def test_structs_lie_as_in_c(name: str, compiled: dict[str, tuple[int, ...]]) -> None:
    struct = MIRRORED[name]
    assert compiled[name] == (ctypes.sizeof(struct),)
    for field, offset, size in fields(struct):
        assert compiled[f"{name}.{field}"] == (offset, size), field


@pytest.mark.parametrize("name", MIRRORED)
def test_no_field_of_c_is_missing(name: str) -> None:
    # A new field can hide where padding was; so the header's text is asked, too.
    text = re.sub(r"//.*|/\*.*?\*/", "", HEADER.read_text())
    body = re.search(rf"typedef struct {name} \{{(.*?)\n ?\}} {name};", text, re.S)
    assert body is not None
    assert body[1].count(";") == sum("." not in field or name == "sluice_tensor"
                                     for field, _, _ in fields(MIRRORED[name]))


def test_constants_are_those_of_c(compiled: dict[str, tuple[int, ...]]) -> None:
    for name, value in constants().items():
        assert compiled[name] == (value,), name


def test_every_function_of_the_header_is_there() -> None:
    declared = set(re.findall(r"SLUICE_API [^;(]*?\bsluice_(\w+)\(", HEADER.read_text()))
    here = set(_library._STATUS) | {"abi_version", "version", "last_error", "cuda_devices", "engine_destroy",
                                    "admission_destroy"}
    # Classes of errors have names, and engine_attend_layer takes rehearsed queries, too.
    assert declared - here == {"status_name", "engine_attend_rehearsed"}


@pytest.mark.parametrize(("kind", "struct"), [(sluice.Stats, structs.Stats), (sluice.Sizes, structs.EngineSizes), (sluice.Memory, structs.Memory),
                                              (sluice.Audit, structs.Audit), (sluice.HeadAudit, structs.HeadAudit),
                                              (sluice.AdmissionUse, structs.AdmissionUse)])
def test_figures_have_all_fields(kind: type, struct: type[ctypes.Structure]) -> None:
    have = [field.name for field in dataclasses.fields(kind)]
    assert have == [name for name, _ in struct._fields_ if name not in ("struct_size", "reserved")]


def test_options_have_all_fields() -> None:
    have = {field.name for field in dataclasses.fields(sluice.EngineOptions)}
    have -= {"device", "largest", "cores", "windows", "policies"}
    largest = {f"largest_{field.name}" for field in dataclasses.fields(sluice.Bucket)}
    apart = largest | {"struct_size", "device_type", "device_id", "core_count", "cores", "window_count", "windows",
                       "policy_count", "policies", "reserved"}
    unused = {name for name, _ in structs.EngineOptions._fields_ if name.startswith("unused_")}
    assert have == {name for name, _ in structs.EngineOptions._fields_} - apart - unused
