"""Each policy against a few lines of float64, and the choice among them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import history
import measure
import policies
import pytest
import report
import torch
from emulation import Emulation
from policies import BYPASS, HISTORY, SAMPLE, SINKS, STREAMING, Prompt, Rows
from router import LOOK, Budgets, Look, look, step
from transformers import LlamaConfig, LlamaForCausalLM

KV, GROUP, DIM = 2, 3, 16
torch.set_num_threads(1)  # Tensors are small: threads would only wait for each other.


def rows_of(tokens: int, rows: int, group: int = GROUP, seed: int = 0) -> Rows:
    make = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, DIM, generator=make) for shape in ((KV, group, rows), (KV, tokens), (KV, tokens)))
    return Rows(q, k, v, DIM**-0.5)


def dense(rows: Rows) -> torch.Tensor:
    out = torch.zeros(rows.q.shape, dtype=torch.float64)
    for row in range(rows.q.shape[2]):
        seen = rows.first + row + 1
        scores = torch.einsum("kgd,knd->kgn", rows.q[:, :, row].double(), rows.k[:, :seen].double()) * rows.scale
        out[:, :, row] = torch.einsum("kgn,knd->kgd", scores.softmax(-1), rows.v[:, :seen].double())
    return out.float()


def seen_by(rows: Rows, budgets: Budgets | None = None) -> Look:
    return look(rows, rows.scores(), dense(rows), budgets or Budgets(recent=8, history=8, sample=8))


def later(rows: Rows, count: int) -> tuple[Rows, Look]:
    """The newest `count` rows as steps behind a prompt of the others."""
    prompt = Rows(rows.q[:, :, :-count], rows.k[:, :-count], rows.v[:, :-count], rows.scale)
    return Rows(rows.q[:, :, -count:], rows.k, rows.v, rows.scale), seen_by(prompt)


def choice(*policy: int) -> torch.Tensor:
    return torch.tensor([policy, policy])


@pytest.mark.parametrize("policy, budgets", [
    (SAMPLE, Budgets(sample=10**6)), (SAMPLE, Budgets(sample=20)), (STREAMING, Budgets(recent=10**6)),
    (HISTORY, Budgets(history=10**6, recent=10**6))])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_what_attends_everything_is_dense(policy: int, budgets: Budgets, group: int) -> None:
    steps, seen = later(rows_of(150 + LOOK, LOOK + 5, group), 5)
    out, cost = step(steps, steps.scores(), seen, torch.full((KV, group), policy), budgets, seed=1)
    whole = policy != SAMPLE or budgets.sample > 1000
    assert torch.allclose(out, dense(steps), atol=1e-4) == whole
    assert (cost.tokens == pytest.approx(150 + LOOK - 2)) == whole


def test_samples_are_unbiased() -> None:
    rows, far = rows_of(64, 1), torch.ones(1, 64, dtype=torch.bool)
    scores = 3 * rows.scores()
    estimates = scores + torch.randn(scores.shape, generator=torch.Generator().manual_seed(5))
    own, union = [], []
    for seed in range(3000):
        drawn, chances = policies.sample(estimates, far, policies.draws(seed, KV, GROUP, 64), 8)
        assert (drawn.sum(-1) == 8).all()
        own.append((scores.exp() * drawn / chances.clamp_min(1e-12)).sum(-1))
        any_chance = policies.together(chances).clamp_min(1e-12)[:, None]
        union.append((scores.exp() * drawn.any(1, keepdim=True) / any_chance).sum(-1))
    for sums in (own, union):
        found, want = torch.stack(sums).double(), scores.double().exp().sum(-1)
        assert ((found.mean(0) - want).abs() < 4 * found.std(0) / 3000**0.5).all()


def test_draws_of_few_tokens_are_all_of_them() -> None:
    rows, far = rows_of(9, 1), torch.zeros(1, 9, dtype=torch.bool)
    far[:, 2:6] = True
    for count in (4, 8, 9, 50):
        drawn, chances = policies.sample(rows.scores(), far, policies.draws(0, KV, GROUP, 9), count)
        assert (drawn == far).all() and (chances == far.float()).all()


def test_copies_are_near_and_their_errors_do_not_grow_with_a_common_part() -> None:
    k = rows_of(200, 1).k
    away = (policies.copies(k, 150) - k).abs().max()
    assert 0 < away < 0.5
    assert torch.allclose(policies.copies(k + 100, 150) - 100, policies.copies(k, 150), atol=0.3)
    with pytest.raises(ValueError, match="head_dim is 96; the rotation needs a power of two"):
        policies.copies(torch.zeros(1, 4, 96), 4)


def test_a_pattern_of_distances_and_one_of_positions_are_found() -> None:
    scores = torch.full((2, 40, 300), -30.0)
    for row in range(40):
        scores[0, row, 260 + row - 37] = scores[1, row, 57] = 30.0
        scores[:, row, 261 + row :] = -torch.inf
    tables = history.Tables.of_queries(scores[:, :32], 260, SINKS)
    assert tables.vertical.sum(1).tolist() == pytest.approx([10, 10], rel=1e-3)
    assert tables.slash.sum(1).tolist() == pytest.approx([10, 10], rel=1e-3)
    kept, scored = history.choose(tables, scores[:, 32:], 292, 2, 5)
    assert all(kept[0, row, 292 + row - 37] and kept[1, row, 57] for row in range(8))
    assert kept.sum() <= 2 * 8 * 2 and (scored >= kept).all() and scored.sum(-1).max() < 60
    assert tables.slash.sum(1).tolist() == pytest.approx([10, 10], rel=1e-3)


def test_a_head_on_its_sinks_is_bypassed_and_one_with_a_far_key_is_not() -> None:
    make = torch.Generator().manual_seed(1)
    q = torch.zeros(1, 2, LOOK, DIM)
    q[..., 0] = 1
    q[:, 1, :, 1] = 1
    k = 0.01 * torch.randn(1, 500, DIM, generator=make)
    k[:, :SINKS, 0] = 30
    k[:, 100, 1] = 90
    v = torch.randn(1, 500, DIM, generator=make)
    seen = seen_by(Rows(q, k, v, 1.0), Budgets(recent=8, history=4))
    assert seen.route(0.05).tolist() == [[BYPASS, HISTORY]]
    assert seen.route(0.05, together=True).tolist() == [[HISTORY, HISTORY]]
    assert (seen.route(-1.0) == SAMPLE).all() and (seen.route(10.0) == BYPASS).all()


def test_a_mixed_kv_head_reads_the_union_and_leaves_bypassed_heads_alone() -> None:
    budgets = Budgets(sample=8, history=8, recent=8)
    steps, seen = later(rows_of(300, LOOK + 4), 4)
    scores = steps.scores()

    def tokens(*policy: int) -> float:
        return step(steps, scores, seen, choice(*policy), budgets, 1)[1].tokens

    assert tokens(BYPASS, BYPASS, BYPASS) == SINKS + policies.LOCAL
    assert tokens(STREAMING, BYPASS, STREAMING) == tokens(STREAMING, STREAMING, STREAMING) == SINKS + 8
    assert tokens(SAMPLE, STREAMING, BYPASS) == SINKS + 8 + 8 < tokens(SAMPLE, SAMPLE, SAMPLE)
    assert SINKS + 8 < tokens(HISTORY, STREAMING, STREAMING) <= SINKS + 16
    out, cost = step(steps, scores, seen, choice(BYPASS, STREAMING, SAMPLE), budgets, 1)
    assert torch.equal(out[:, 0], policies.bypass(steps, scores, seen.prompt)[:, 0])
    assert torch.allclose(out[:, 1], policies.attend(scores, steps.v, steps.near(8))[:, 1]) and out.isfinite().all()
    codes = 298.5 * (DIM // 2 + 4)
    assert cost.bytes == pytest.approx(4 * DIM * cost.tokens + codes)


def test_the_prompt_says_the_mean_score_exactly() -> None:
    rows = rows_of(120, 3)
    prompt = Prompt.of(rows)
    scores = torch.einsum("kgd,knd->kgn", rows.q[:, :, 1], rows.k[:, SINKS:]) * rows.scale
    mean = torch.einsum("kgd,kd->kg", rows.q[:, :, 1], prompt.mean_key) * rows.scale
    assert torch.allclose(mean, scores.mean(-1), atol=1e-5)
    last = torch.einsum("kgd,knd->kgn", rows.q[:, :, 2], rows.k[:, SINKS:]) * rows.scale
    assert torch.allclose(prompt.spread * (rows.q[:, :, 2] ** 2).sum(-1), last.var(-1, False), rtol=1e-4)


def test_a_budget_for_as_many_tokens() -> None:
    points = [(16, 132 + 30.0), (64, 132 + 120.0), (256, 132 + 480.0)]
    assert measure.matched(points, 132 + 60.0) == 32 and measure.matched(points, 132 + 240.0) == 128
    assert measure.matched(points, 132 + 7.5) == 4 and measure.matched(points, 100.0) >= 1
    assert measure.matched([(16, 140.0), (128, 150.0), (1024, 150.0)], 300.0) == 1024


@pytest.mark.parametrize("words", [[], ["--model", "a=b"], ["--out", "f"], ["--model", "a", "--out", "f"],
                                   ["--model", "a=b", "--out", "f", "--tokens", "600"],
                                   ["--model", "a=b", "--out", "f", "--bounds", "0.1;2"]])
def test_wrong_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure.arguments(words)
    assert "--" in capsys.readouterr().err


def test_a_small_model_is_measured(tmp_path: Path) -> None:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                 num_key_value_heads=2, vocab_size=64)).save_pretrained(tmp_path)
    found = measure.measure(Emulation(str(tmp_path)), torch.randint(64, (700,)), 8, [-1.0, 1e9])
    json.dumps(found)
    none, every = found["bounds"][0], found["bounds"][1]
    assert none["shares"]["sample"] == 1 and none["same_policy_later"] == 1 and every["shares"]["bypass"] == 1
    assert every["kl"] == next(row["kl"] for row in found["singles"] if row["policy"] == "bypass")
    assert found["floor"] < 1e-3 and none["kl"] < every["kl"] + 1e-3
    row = {"model": "tiny", "tokens": 700, **found}
    assert "tiny, 700 tokens, 2 windows" in report.table([{"command": "measure.py"}, row, row])


def test_a_report_wants_no_torch() -> None:
    names = "import sys; import report; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", names], cwd=Path(report.__file__).parent, check=True, timeout=60)
