"""An engine's forwards, captured in a torch graph together with torch's own kernels.

    python3 torch_engine_test.py build/release/tests/gpu/libtorch_engine.so

Checked are: the graph's hidden states are those of the same forward without a graph, bit by bit; with a budget of
everything they are dense attention's; a replay without a plan gives NaN and changes nothing.
"""

import sys

from torch_rig import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, Engine, Model, prompts, torch


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
        assert engine.count("unplanned") == (len(range(1, steps, 4)) if graphs else 0)
    return torch.stack(results), engine.count("asked")


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
