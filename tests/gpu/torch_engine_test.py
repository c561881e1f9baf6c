"""An engine's forwards, captured in a torch graph together with torch's own kernels.

    python3 torch_engine_test.py build/release/tests/gpu/libtorch_engine.so

The model is a stand-in: every layer's q, k and v are products of the hidden state and random weights, and its output
goes back into the hidden state. Checked are: the graph's hidden states are those of the same forward without a graph, bit
by bit; with a budget of everything they are dense attention's; a replay without a plan gives NaN and changes nothing.
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
        "layers", "q_heads", "kv_heads", "head_dim", "rows", "blocks", "near_blocks", "max_picks")]


class Engine:
    def __init__(self, library, rows, blocks, near_blocks):
        self.lib = ctypes.CDLL(library)
        self.lib.engine_error.restype = ctypes.c_char_p
        self.lib.engine_asked.restype = self.lib.engine_unplanned.restype = ctypes.c_uint64
        self.engine = ctypes.c_void_p()
        sizes = Sizes(LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, rows, blocks, near_blocks, 4096)
        self.check(self.lib.engine_new(ctypes.byref(sizes), ctypes.byref(self.engine)))

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


def decode(library, policy, lengths, steps, near_blocks, graphs):
    """Hidden states [steps, rows, hidden], and how often the CPU was asked."""
    engine = Engine(library, len(lengths), sum(n + steps + 16 for n in lengths) // 16 + len(lengths), near_blocks)
    model = Model(len(lengths))
    stream = torch.cuda.Stream()
    results, graph = [], None
    with torch.cuda.stream(stream):
        sequences = []
        for k, v in prompts(lengths):
            sequences.append(engine.begin(policy))
            engine.import_prefix(sequences[-1], k, v)
        if graphs:
            # cuBLAS allocates its workspace at its first call, which must not be captured.
            model.forward(lambda layer, q, k, v, out: out.zero_())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                model.forward(engine.attend)
        torch.manual_seed(3)
        for step in range(steps):
            model.hidden.copy_(torch.randn(model.hidden.shape, device="cuda"))
            forward = engine.plan(sequences)
            if graphs:
                graph.replay()
            else:
                model.forward(engine.attend)
            engine.finish(forward)
            torch.cuda.synchronize()
            results.append(model.result.clone())
            if graphs and step % 4 == 1:
                graph.replay()
                torch.cuda.synchronize()
                assert model.result.isnan().all(), "a replay without a plan gave numbers"
        assert engine.lib.engine_unplanned(engine.engine) == (len(range(1, steps, 4)) if graphs else 0)
    return torch.stack(results), engine.lib.engine_asked(engine.engine)


def dense(lengths, steps):
    """The same with torch's attention over all tokens, in float32."""
    model = Model(len(lengths))
    caches = [[[k[layer].float(), v[layer].float()] for layer in range(LAYERS)] for k, v in prompts(lengths)]

    def attend(layer, q, k, v, out):
        for row, cache in enumerate(caches):
            for i, new in enumerate((k, v)):
                cache[layer][i] = torch.cat([cache[layer][i], new[row:row + 1].float()])
            keys, values = (x.repeat_interleave(Q_HEADS // KV_HEADS, dim=1).transpose(0, 1) for x in cache[layer])
            scores = (q[row].float().unsqueeze(1) @ keys.transpose(1, 2)) * HEAD_DIM ** -0.5
            out[row] = (scores.softmax(-1) @ values).squeeze(1).bfloat16()

    results = []
    torch.manual_seed(3)
    for _ in range(steps):
        model.hidden.copy_(torch.randn(model.hidden.shape, device="cuda"))
        model.forward(attend)
        results.append(model.result.clone())
    return torch.stack(results)


def main():
    library = sys.argv[1]
    steps = 24
    everything = "exact | int4 | top_k=4096 | near=0,sinks=4,recent=24"
    some = "exact | int4 | top_k=64 | near=0,sinks=4,recent=24"
    for lengths in ([1500], [700, 33, 1200, 5, 64, 999, 2000, 1]):
        for near_blocks in (0, 40):
            plain, asked = decode(library, some, lengths, steps, near_blocks, False)
            graph, _ = decode(library, some, lengths, steps, near_blocks, True)
            assert asked > 0 and plain.isfinite().all()
            assert torch.equal(plain, graph), f"batch {len(lengths)}: a graph gives other numbers"
            print(f"batch {len(lengths)}, {near_blocks} near blocks: with a graph as without")
        full, _ = decode(library, everything, lengths, steps, 40, True)
        want = dense(lengths, steps)
        error = ((full.float() - want.float()).norm() / want.float().norm()).item()
        print(f"batch {len(lengths)}: everything chosen, {error:.2e} off torch's dense attention")
        assert error < 1e-2
    print("torch_engine_test: passed")


if __name__ == "__main__":
    main()
