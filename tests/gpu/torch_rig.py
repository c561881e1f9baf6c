"""An engine that torch_engine.cpp makes, and a model around it, for tests that capture forwards in torch's graphs.

The model is a stand-in: every layer's q, k and v are products of the hidden state and random weights, and its output
goes back into the hidden state. Whoever imports this ends with 77 where there is no torch or no GPU.
"""

import ctypes
import sys

try:
    import torch
except ImportError:
    print("skipped: there is no torch")
    sys.exit(77)
if not torch.cuda.is_available():
    print("skipped: torch finds no CUDA device")
    sys.exit(77)

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 4, 32, 8, 128
HIDDEN = 512


class Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in (
        "layers", "q_heads", "kv_heads", "head_dim", "rows", "blocks", "near_blocks", "max_picks", "in_flight",
        "threads")]


class Engine:
    def __init__(self, library, rows, blocks, near_blocks, policies=(), in_flight=2, threads=0):
        """`policies`: those that choose on the CPU are served if they are named here."""
        self.lib = ctypes.CDLL(library)
        self.lib.engine_error.restype = ctypes.c_char_p
        self.engine = ctypes.c_void_p()
        sizes = Sizes(LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, rows, blocks, near_blocks, 4096, in_flight, threads)
        self.check(self.lib.engine_new(ctypes.byref(sizes), "\n".join(policies).encode(), 16 * blocks,
                                       ctypes.byref(self.engine)))

    def check(self, failed):
        if failed:
            raise RuntimeError(self.lib.engine_error().decode())

    def __del__(self):
        self.lib.engine_delete(self.engine)

    @staticmethod
    def stream():
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def begin(self, policy):
        sequence = ctypes.c_uint64()
        self.check(self.lib.engine_begin(self.engine, policy.encode(), ctypes.byref(sequence)))
        return sequence.value

    def import_prefix(self, sequence, k, v):
        """k, v [layers, tokens, kv_heads, head_dim]"""
        for first in range(0, k.shape[1], 512):
            for layer in range(LAYERS):
                part_k = k[layer, first:first + 512].contiguous()
                part_v = v[layer, first:first + 512].contiguous()
                self.check(self.lib.engine_import(
                    self.engine, ctypes.c_uint64(sequence), layer, part_k.shape[0],
                    ctypes.c_void_p(part_k.data_ptr()), ctypes.c_void_p(part_v.data_ptr()), self.stream()))
            torch.cuda.synchronize()

    def plan(self, sequences):
        forward = ctypes.c_uint64()
        ids = (ctypes.c_uint64 * len(sequences))(*sequences)
        self.check(self.lib.engine_plan(self.engine, ids, len(sequences), self.stream(), ctypes.byref(forward)))
        return forward.value

    def attend(self, layer, q, k, v, out):
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out)]
        self.check(self.lib.engine_attend(self.engine, layer, *pointers, self.stream()))

    def finish(self, forward):
        self.check(self.lib.engine_finish(self.engine, ctypes.c_uint64(forward)))

    def pause(self, us):
        """Threads that answer sleep as long before each part of an answer."""
        self.lib.engine_pause(self.engine, us)

    def count(self, what, *of):
        """A number that the engine keeps: asked, unplanned, promoted, scored, or learnt of a sequence."""
        get = getattr(self.lib, f"engine_{what}")
        get.restype = ctypes.c_uint64
        return get(self.engine, *map(ctypes.c_uint64, of))


class Model:
    def __init__(self, rows):
        torch.manual_seed(1)

        def weights(inner, outer):
            return (torch.randn(LAYERS, inner, outer, device="cuda") * inner ** -0.5).bfloat16()

        self.q, self.k, self.v = (weights(HIDDEN, heads * HEAD_DIM) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        self.o = weights(Q_HEADS * HEAD_DIM, HIDDEN)
        self.hidden = torch.zeros(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.result = torch.zeros_like(self.hidden)
        self.kept = [[None] * LAYERS for _ in range(3)]  # q, k, v of the last forward

    def forward(self, attend):
        x = self.hidden
        for layer in range(LAYERS):
            rows = x.shape[0]
            q = (x @ self.q[layer]).view(rows, Q_HEADS, HEAD_DIM)
            k = (x @ self.k[layer]).view(rows, KV_HEADS, HEAD_DIM)
            v = (x @ self.v[layer]).view(rows, KV_HEADS, HEAD_DIM)
            for kept, tensor in zip(self.kept, (q, k, v)):
                kept[layer] = tensor
            out = torch.empty_like(q)
            attend(layer, q, k, v, out)
            x = x + out.view(rows, -1) @ self.o[layer]
        self.result.copy_(x)


def prompts(lengths):
    torch.manual_seed(2)
    return [tuple(torch.randn(LAYERS, n, KV_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
            for n in lengths]
