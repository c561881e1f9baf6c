"""What benchmarks/papers/tactic.py and selectors.py count is what their definitions say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import paper_figures  # noqa: E402
from papers import selectors, tactic  # noqa: E402
from papers.attention import Layer, shares  # noqa: E402

MODEL = Path(__file__).parents[3] / "tests" / "data" / "testbed"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("target", "wanted"), [(0.7, 3050), (0.9, 10979)])
def test_an_exact_curve_gives_the_exact_budget(target: float, wanted: int) -> None:
    weights = 3000 / torch.arange(1, 16385) + 0.5
    count, a, b = tactic.fitted_count(weights, target)
    assert count == pytest.approx(wanted, rel=0.01)
    assert (a, b) == (pytest.approx(3000, rel=0.01), pytest.approx(0.5, rel=0.02))


@pytest.mark.parametrize("weights", [torch.linspace(20, 0, 4096) ** 4, torch.ones(4096), torch.linspace(1, 2, 4096),
                                     torch.nn.functional.one_hot(torch.tensor(0), 4096).float()])
def test_a_budget_grows_with_its_target_and_ends_with_the_tokens(weights: torch.Tensor) -> None:
    counts = [tactic.fitted_count(weights, target)[0] for target in (*tactic.TARGETS, 1.0)]
    assert counts == sorted(counts) and 1 <= counts[0] and counts[-1] <= 4096
    scaled = [tactic.fitted_count(weights * 8, target)[0] for target in (*tactic.TARGETS, 1.0)]
    assert scaled == counts  # Another shift of the logits.


def test_a_tail_below_zero_counts_as_nothing() -> None:
    count, a, b = tactic.fitted_count(torch.linspace(20, 0, 4096) ** 4, 1.0)
    assert b < 0 and count == pytest.approx(-a / b, abs=1)


def test_a_page_is_never_below_its_tokens() -> None:
    queries, keys = drawn(4, 16), drawn(100, 16, seed=1)
    bounds = tactic.box_scores(queries, keys)
    assert bounds.shape == (4, 100) and (bounds >= queries @ keys.T - 1e-5).all()
    assert bounds[:, 96:].equal(bounds[:, 99:].expand(4, 4))


def test_outputs_are_within_the_bound_of_what_is_left_out() -> None:
    queries, keys, values = drawn(4, 16) * 3, drawn(200, 16, seed=1), drawn(200, 16, seed=2)
    masses = shares(queries, keys)
    errors, of_bound = tactic.outputs_off(masses, masses > 0.002, values)
    assert min(errors) > 0 and max(of_bound) <= 1
    kept = (masses * (masses > 0.002))[0].double()
    wanted = kept / kept.sum() @ values.double() - masses[0].double() @ values.double()
    assert errors[0] == pytest.approx(float(wanted.norm() / (masses[0].double() @ values.double()).norm()), rel=1e-4)
    assert max(tactic.outputs_off(masses, torch.ones_like(masses, dtype=torch.bool), values)[0]) == 0


def test_channels_are_those_of_large_products() -> None:
    keys, queries = drawn(64, 2, 16), drawn(8, 4, 16, seed=1)
    keys[:, 0, 3] *= 50
    queries[:, 2:, 7] *= 50
    first, second = selectors.heavy_channels(Layer(queries, keys, keys))
    assert first[0] == 3 and second[0] == 7 and len(first) == 4


def found(figure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> list[dict]:
    command = ["paper_figures.py", figure, "--model", str(MODEL), "--length", "768", "--steps", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--count", "1"])
    paper_figures.main()
    return json.loads(capsys.readouterr().out)["results"][figure]


def test_what_tactic_rests_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    rows = found("tactic", monkeypatch, capsys)
    orders = {(row["order"], row["tokens"]): row["mass"] for row in rows if row["what"] == "order"}
    for tokens in tactic.BUDGETS[:3]:
        assert orders["optimal", tokens] > orders["clusters", tokens] > orders["pages", tokens]
    assert all(row["of_bound_worst"] <= 1 for row in rows if row["what"] == "distance")
    assert all(row["tokens_together"] <= row["tokens_apart"] for row in rows if row["what"] == "union")
    assert len([row for row in rows if row["what"] == "head"]) == 8 * 8
    assert {row["order"] for row in rows if row["what"] == "curve"} == {"optimal", "clusters", "fitted"}


def test_what_selectors_leave(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    rows = {(row["selector"], row["top_p"]): row for row in found("selectors", monkeypatch, capsys)}
    assert set(rows) == {(name, top_p) for name in ("full", "quest", "double_sparsity") for top_p in (None, 0.85, 0.95)}
    for name in ("full", "quest", "double_sparsity"):
        assert rows[name, None]["mass"] > rows[name, 0.95]["mass"] > rows[name, 0.85]["mass"]
        assert rows[name, None]["tokens"] > rows[name, 0.95]["tokens"] > rows[name, 0.85]["tokens"]
    assert rows["full", None]["mass"] == pytest.approx(1, abs=1e-5)
    assert rows["full", 0.95]["mass"] > rows["quest", 0.95]["mass"]
