"""Tensors of numpy, torch and whatever speaks DLPack, as the C interface takes them. Nothing is copied."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from sluice import _structs as structs
from sluice.errors import InvalidArgument

_DLTENSOR = b"dltensor"
# A prototype of our own: attributes of ctypes.pythonapi belong to everybody.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))
_KINDS = {"f": structs.TYPE_FLOAT, "i": structs.TYPE_INT, "u": structs.TYPE_UINT}
_NATIVE = "<|=" if sys.byteorder == "little" else ">|="


class BFloat16:
    """A uint16 array whose elements are the bits of bf16 numbers. (Arrays of ml_dtypes' bfloat16 need no such mark.)"""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        if str(getattr(array, "dtype", None)) != "uint16":
            raise InvalidArgument(f"bf16() takes the bits of bf16 numbers as an array of uint16, not of "
                                  f"{getattr(array, 'dtype', type(array).__name__)}")
        self.array = array


def bf16(array: Any) -> BFloat16:
    """Says that a uint16 array has the bits of bf16 numbers."""
    return BFloat16(array)


class Argument:
    """A tensor argument of a call, in one struct that is used for all calls. Exports that must outlive a call go to
    `held`, which the caller empties."""

    def __init__(self, name: str, held: list[object], cuda: bool, written: bool = False) -> None:
        self._name, self._held, self._cuda, self._written = name, held, cuda, written
        self._tensor = structs.Tensor()
        self._tensor.dtype.lanes = 1
        self._own = ctypes.addressof(self._tensor)
        self._key: object = None  # Of what the struct describes, but for its address.
        self._array_kind: type | None = None  # The newest kind of array that was seen to be one.

    def __call__(self, tensor: Any) -> int:
        """The address of a struct that describes the tensor until the next call."""
        kind = type(tensor)
        if kind is self._array_kind:
            try:
                capsule = tensor.__dlpack__()
            except BufferError:  # An array that is read-only, or of bf16: DLPack as numpy speaks it has neither.
                return self._array(tensor)
            self._held.append(capsule)
            return _capsule_pointer(capsule, _DLTENSOR)
        if not hasattr(kind, "data_ptr"):
            return self._other(tensor)
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device,
               self._cuda and not tensor.is_cuda and tensor.is_pinned())
        if key != self._key:
            self._describe_torch(key)
        if tensor.requires_grad:
            raise self._refused("would need gradients, and there are none of this attention; call it under "
                                "torch.no_grad(), or detach() the tensor")
        self._tensor.data = tensor.data_ptr()
        return self._own

    def _refused(self, what: str) -> InvalidArgument:
        return InvalidArgument(self._name + ("" if what.startswith(".") else " ") + what)

    def _other(self, tensor: Any) -> int:
        if isinstance(tensor, BFloat16):
            return self._array(tensor.array, bfloat=True)
        kind = type(tensor)
        if hasattr(kind, "__array_interface__"):
            if not hasattr(kind, "__dlpack__"):
                return self._array(tensor)
            self._array_kind = kind
            return self(tensor)
        if self._written or not hasattr(kind, "__dlpack__"):
            raise self._refused(f"is of type {kind.__name__}; it must be a numpy array or a torch tensor"
                                + ("" if self._written else ", or have __dlpack__")
                                + (", for it is written" if self._written else ""))
        try:
            # -1: the producer waits for nothing; the caller's stream has that order.
            capsule = tensor.__dlpack__(stream=-1) if self._cuda else tensor.__dlpack__()
        except (BufferError, RuntimeError, TypeError) as reason:
            raise self._refused(f"cannot be exported: {reason}") from reason
        self._held.append(capsule)
        return _capsule_pointer(capsule, _DLTENSOR)

    def _array(self, array: Any, bfloat: bool = False) -> int:
        interface = array.__array_interface__
        address, read_only = interface["data"]
        if read_only and self._written:
            raise self._refused("is a read-only array, and it is written; make a copy")
        key = (interface["shape"], interface["strides"], interface["typestr"], array.dtype, bfloat)
        if key != self._key:
            self._describe_array(key)
        self._tensor.data = address
        return self._own

    def _describe_array(self, key: tuple) -> None:
        shape, strides, typestr, dtype, bfloat = key
        code, size = typestr[1], dtype.itemsize
        bfloat = bfloat or dtype.name == "bfloat16"
        if typestr[0] not in _NATIVE or not (bfloat or code in _KINDS):
            raise self._refused(f".dtype is {dtype}; convert it to float32, float16 or bfloat16 of this machine's "
                                "byte order")
        if strides is not None and any(stride % size for stride in strides):
            raise self._refused(f".strides are {strides} bytes, no multiples of its element of {size}; make a copy")
        self._describe(shape, strides and [stride // size for stride in strides],
                       structs.TYPE_BFLOAT if bfloat else _KINDS[code], 8 * size, structs.DEVICE_CPU, 0)
        self._key = key

    def _describe_torch(self, key: tuple) -> None:
        shape, strides, dtype, device, pinned = key
        if device.type not in ("cpu", "cuda"):
            raise self._refused(f"is on {device}; it must be on the CPU or a CUDA device")
        if str(dtype) == "torch.bfloat16":
            code = structs.TYPE_BFLOAT
        else:
            code = structs.TYPE_FLOAT if dtype.is_floating_point else structs.TYPE_INT
        on_cpu = structs.DEVICE_CUDA_HOST if pinned else structs.DEVICE_CPU
        self._describe(shape, strides, code, 8 * dtype.itemsize,
                       structs.DEVICE_CUDA if device.type == "cuda" else on_cpu, device.index or 0)
        self._key = key

    def _describe(self, shape: Any, strides: Any, code: int, bits: int, device: int, device_id: int) -> None:
        self._key = None
        sizes = ctypes.c_int64 * len(shape)
        tensor = self._tensor
        # Fields of pointers keep alive what they point to.
        tensor.ndim, tensor.shape = len(shape), sizes(*shape)
        tensor.strides = None if strides is None else sizes(*strides)
        tensor.dtype.code, tensor.dtype.bits = code, bits
        tensor.device.device_type, tensor.device.device_id = device, device_id
