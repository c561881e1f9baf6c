"""What benchmarks/papers/codes.py finds by copies of keys is what their definitions say, computed one by one."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sluice.transformers import balance
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import paper_figures  # noqa: E402
from papers import codes  # noqa: E402
from papers.attention import Layer, attention_of  # noqa: E402

ROOT = Path(__file__).parents[3]
GROUP, SIZE = 2, 16


def rows(count: int, seed: int = 0, size: int = SIZE) -> torch.Tensor:
    """Channels of very different sizes, as keys have them."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=drawn) * torch.logspace(-1, 1, size)[torch.randperm(size, generator=drawn)]


def layer(tokens: int = 400, steps: int = 5, seed: int = 0) -> Layer:
    queries = rows(steps * 2 * GROUP, seed + 1).view(steps, 2 * GROUP, SIZE) * 0.3
    keys = rows(tokens * 2, seed + 2).view(tokens, 2, SIZE)
    return Layer(queries, keys, keys)


def coded(keys: torch.Tensor) -> dict[str, codes.Copy]:
    return codes.copies(keys, codes.sizes(rows(30, 7), rows(60, 7)))


def test_int4_has_the_format_of_the_engines_copy() -> None:
    """CodeLayout of include/sluice/step/int4.hpp, a channel after the other."""
    keys = torch.cat([rows(40), torch.zeros(1, SIZE), torch.full((1, SIZE), -3.3), rows(2) * 1e6, rows(2) * 1e-7])
    got, scale, zero = codes.int4(keys)
    for key, code, step, least in zip(keys.numpy(), got.numpy(), scale.numpy(), zero.numpy(), strict=True):
        want_step = np.float32(np.float16(min(max((key.max() - key.min()) / np.float32(15), 2.0 ** -24), 65504)))
        want_least = np.float32(np.float16(min(max(key.min(), -65504), 65504)))
        assert (step[0], least[0]) == (want_step, want_least)
        for channel, value in enumerate(key):
            want = np.rint((value - want_least) * (np.float32(1) / want_step))
            assert code[channel] == min(max(want, 0), 15)
    assert (codes.all_bits(rows(40)) - rows(40)).abs().le(scale[:40] * 0.51 + zero[:40].abs() * 2 ** -10).all()


def test_high_bits_are_the_codes_without_their_low_ones() -> None:
    got, scale, zero = codes.int4(rows(40))
    want = ((got.int() >> 2 << 2) + 1.5) * scale + zero
    assert codes.high_bits(rows(40)).equal(want)


def test_what_turns_keys_keeps_products() -> None:
    keys, queries = rows(40), rows(8, 1)
    assert torch.allclose(queries @ codes.turned(lambda same: same, keys).T, queries @ keys.T, atol=1e-3)
    seen = []
    codes.turned(lambda turned: seen.append(turned) or turned, keys)
    size = seen[0].abs().mean(0)
    assert size.max() < 4 * size.min() and keys.abs().mean(0).max() > 20 * keys.abs().mean(0).min()


@pytest.mark.parametrize("code", (codes.two_bits, codes.on_grid, codes.signs))
def test_codes_give_a_keys_product_with_itself(code) -> None:
    keys = rows(40)
    got = code(keys)
    assert torch.allclose((got * keys).sum(1), (keys * keys).sum(1), rtol=2e-3)
    each = got / got.abs().amax(1, keepdim=True)
    values = {codes.two_bits: 4, codes.signs: 2}.get(code)
    assert all(len({round(float(value), 4) for value in row}) <= (values or 32) for row in each)
    if code is codes.on_grid:
        assert len({tuple(point.tolist()) for point in codes.grid()}) == 16


@pytest.mark.parametrize("bits", range(1, 7))
def test_steps_are_the_best_for_normal_values(bits: int) -> None:
    values = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    weights = torch.exp(-values ** 2 / 2)

    def left(step: float) -> float:
        most = 2 ** (bits - 1)
        points = ((values / step).floor().clamp(-most, most - 1) + 0.5) * step
        return float((weights * (values - points) ** 2).sum() / weights.sum())

    step = float(codes.STEPS[bits])
    assert left(step) == pytest.approx(float(codes.LEFT[bits]), rel=0.05)
    assert left(step) < min(left(step * 0.95), left(step * 1.05))


@pytest.mark.parametrize("seed", range(4))
def test_bits_are_shared_out_as_no_other_way_is_better(seed: int) -> None:
    weights = torch.rand(4, generator=torch.Generator().manual_seed(seed)) ** 4
    given = codes.shared_out(weights, 2)
    assert given.sum() == 8
    ways = [way for way in itertools.product(range(7), repeat=4) if sum(way) == 8]
    lost = [sum(float(weight * codes.LEFT[bits]) for weight, bits in zip(weights, way, strict=True)) for way in ways]
    assert float((weights * codes.LEFT[given]).sum()) == pytest.approx(min(lost), rel=1e-5)


def test_keys_by_bits_of_each_pair() -> None:
    keys = rows(20)
    own = codes.Sizes(torch.logspace(-3, 3, SIZE // 2), codes.pairs(keys).mean(0), torch.ones(SIZE))
    given = codes.shared_out(own.queries * own.keys, 2).tolist() * 2
    assert 0 in given and max(given) > 2
    size = [math.sqrt(float(own.keys[c % (SIZE // 2)]) / 2) for c in range(SIZE)]
    for key, got in zip(keys.tolist(), codes.by_pair(keys, own, 2).tolist(), strict=True):
        kept = [c for c in range(SIZE) if given[c]]
        scale = float(np.float16(math.sqrt(sum((key[c] / size[c]) ** 2 for c in kept) / len(kept))))
        for c in range(SIZE):
            if c not in kept:
                assert got[c] == 0
                continue
            step = float(codes.STEPS[given[c]]) * size[c] * scale
            most = 2 ** (given[c] - 1)
            want = (min(max(math.floor(key[c] / step), -most), most - 1) + 0.5) * step
            assert got[c] == pytest.approx(want, rel=2e-3)


def test_factors_are_those_by_which_models_are_balanced() -> None:
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3)).eval()
    for block in model.model.layers:
        block.self_attn.k_proj.weight.data *= torch.logspace(-2, 3, 32)[torch.randperm(32), None]
    ids = torch.randint(0, 97, (300,)).tolist()
    layers = list(attention_of(model, ids, 8))
    exponents = balance(model, torch.tensor([ids]))
    assert exponents[0].max() > exponents[0].min() + 2
    for seen, own in zip(layers, exponents, strict=True):
        for head in range(2):
            assert codes.sizes(seen.queries[:, 0], seen.keys[:, head]).factors.log2().equal(own[head])


def test_sinks_recent_and_later_tokens_are_left_out() -> None:
    own = layer(tokens=200, steps=3)
    queries, open_ = codes.seen(own, 1)
    for row in range(3 * GROUP):
        step, head = divmod(row, GROUP)
        assert queries[row].equal(own.queries[step, GROUP + head])
        visible = 198 + step
        assert open_[row].nonzero().flatten().tolist() == list(range(codes.SINKS, visible - codes.RECENT))


@pytest.mark.parametrize("name", (codes.INT4, f"high 2 bits of {codes.SCALED}", "bits by RoPE pair (Block-GTQ)"))
def test_overlap_and_mass_by_sorting(name: str) -> None:
    own, count = layer(), 20
    queries, open_ = codes.seen(own, 0)
    keys = own.keys[:, 0]
    copy = coded(keys)[name]
    bits, overlap, kept = codes.found(queries, keys, open_, coded(keys), count, GROUP)[name].tolist()
    overlaps, masses = [], []
    for row, query in enumerate(queries.double()):
        among = open_[row].nonzero().flatten().tolist()
        exact, estimate = ({t: float(query @ rows_[t].double()) / math.sqrt(SIZE) for t in among}
                           for rows_ in (keys, copy.keys))
        wanted, chosen = (set(sorted(among, key=lambda t: -of[t])[:count]) for of in (exact, estimate))
        overlaps.append(len(wanted & chosen) / count)
        masses.append(sum(math.exp(exact[t]) for t in chosen) / sum(math.exp(exact[t]) for t in wanted))
    assert (bits, overlap) == (copy.bits, pytest.approx(np.mean(overlaps), abs=1e-5))
    assert kept == pytest.approx(np.mean(masses), abs=1e-4)
    assert overlap < 1 and kept < 1


def test_all_candidates_hold_all_the_mass() -> None:
    own = layer()
    queries, open_ = codes.seen(own, 0)
    for name, row in codes.found(queries, own.keys[:, 0], open_, coded(own.keys[:, 0]), 400, GROUP).items():
        bits, overlap, kept = row.tolist()
        assert (overlap, kept) == (1, pytest.approx(1, abs=1e-6)), name
        assert name in coded(own.keys[:, 0]) or bits == 4  # All that a first pass lets through is read again.


def test_a_first_pass_that_lets_all_through_changes_nothing() -> None:
    first, then = torch.randn(2, 6, 100, generator=torch.Generator().manual_seed(3))
    first[:, :10] = then[:, :10] = -torch.inf
    assert codes.reranked(first, then, 100, 8)[0].equal(codes.best(then, 8))
    assert codes.reranked(first, then, 8, 8)[0].equal(codes.best(first, 8))
    assert not codes.reranked(first, then, 16, 8)[0].equal(codes.best(then, 8))
    assert codes.best(then, 100).sum(1).tolist() == [90] * 6


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    model = ROOT / "tests" / "data" / "testbed"
    command = ["paper_figures.py", "codes", "--model", str(model), "--length", "512", "--steps", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--count", "1"])
    paper_figures.main()
    found = {row["code"]: row for row in json.loads(capsys.readouterr().out)["results"]["codes"]}
    assert len(found) == 11 and {row["top_k"] for row in found.values()} == {64}
    high = f"high 2 bits of {codes.INT4}"
    assert found[high]["overlap"] < found[f"{high}, 2k by all 4"]["overlap"] <= found[codes.INT4]["overlap"] < 1
    assert 2 < found[f"{high}, 2k by all 4"]["bits"] < found[f"{high}, 4k by all 4"]["bits"] < 4
    assert found["Hadamard, signs (RaBitQ)"]["bits"] == 1
    monkeypatch.setattr(sys, "argv", [*command, "--count", "1", "--tasks", "kv"])
    with pytest.raises(SystemExit, match="--count 2"):
        paper_figures.main()


def test_every_figure_is_a_part_of_the_record(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").touch()  # It is looked for, but only pictures need it.
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    listed = subprocess.run(["sh", ROOT / "tools" / "record.sh", "--list", "host"], check=True, text=True,
                            stdout=subprocess.PIPE,
                            env={**os.environ, "PYTHONPATH": paths, "RECORD_PYTHON": sys.executable}).stdout
    parts = {line.split()[1] for line in listed.splitlines() if "figure-" in line}
    assert parts == {f"figure-{name}" for name in paper_figures.FIGURES}
    tables = (ROOT / "tools" / "record" / "figure_tables.py").read_text()
    assert all(f'"{part}"' in tables for part in parts)
