"""Perplexity of texts and KL to dense attention, against numbers by hand and by the library itself."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from saved import DEVICE, KV, NOISE, VOCABULARY, model_of
from sluice.errors import InternalError, InvalidArgument, OutOfCapacity
from sluice.evaluation import texts
from sluice.evaluation.decoding import Setup, Subject, check, dense, groups, under
from sluice.evaluation.failures import Failures
from sluice.evaluation.inputs import Window
from sluice.evaluation.reading import Reading
from sluice.evaluation.texts import compare, score_windows, summaries, summary

SINKS = "streaming:sinks=4,recent=8"
SCORED = 6


def setup_of(model: transformers.PreTrainedModel, chunk: int = 64, **options: object) -> Setup:
    return Setup(model, chunk, 16 << 20, {"threads": 1, "pin_threads": False, "answer_timeout_ms": 30_000,
                                          "near_bytes": 0, **KV, **options})


def windows_of(count: int, tokens: int = 200) -> list[Window]:
    generator = torch.Generator().manual_seed(9)
    return [Window(index * tokens, torch.randint(2, VOCABULARY, (tokens,), generator=generator).tolist())
            for index in range(count)]


def nothing(_: str) -> None:
    pass


def read(subject: Subject, window: Window, policy: str,
         at_once: int | None = None) -> tuple[torch.Tensor, Reading | None]:
    """The logits that foretell a window's last tokens, and what was read for them."""
    before = len(window.ids) - SCORED - 1
    with subject.prefix(window.ids[:before]) as prefix, prefix.under(policy) as session:
        session._at_once = at_once or session._at_once
        return session.read(window.ids[before:-1]), session.reading


def test_by_hand() -> None:
    """Two tokens: dense attention gives the second one 3/4, the policy always 1/2."""
    wanted, got = torch.tensor([[0.0, math.log(3)]] * 2), torch.zeros(2, 2)
    window = Window(5, [0, 0, 1, 0])  # What is foretold are the last two: 1, and then 0.
    ours = compare(window, wanted, got, Reading(0.5, 0.25, 0.125, 0, 0.125))
    theirs = compare(window, wanted, wanted, None)
    assert theirs.loss == pytest.approx([math.log(4 / 3), math.log(4)]) and theirs.kl == [0, 0]
    assert ours.loss == pytest.approx([math.log(2)] * 2)
    assert ours.kl == pytest.approx([0.75 * math.log(1.5) - 0.25 * math.log(2)] * 2)
    assert ours.same == [False, False] and theirs.same == [True, True]
    told = summary("p", [ours], [theirs], 0)
    assert told["perplexity"] == pytest.approx(2) and told["attended"] == told["bytes"] == 0.5
    assert not told["whole"] and told["windows"][0]["far_bytes"] == 0.125
    assert told["perplexity_ratio"] == pytest.approx(2 / math.sqrt(16 / 3))
    assert told["kl_max"] == told["kl_p99"] == pytest.approx(told["kl_mean"])
    assert (told["same_token"], told["tokens"], told["windows"][0]["first_other"]) == (0, 2, 0)
    assert told["perplexity_95"] is None  # One window says nothing of others.
    assert summary("dense", [theirs], [theirs], 0)["perplexity"] == pytest.approx(math.sqrt(16 / 3))


def test_tokens_without_a_chance() -> None:
    wanted, got = torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([[1.0, -math.inf, 1.0]])
    assert compare(Window(0, [0, 2]), wanted, got, None).kl == [0]
    assert compare(Window(0, [0, 2]), wanted, torch.tensor([[0.0, -math.inf, -math.inf]]), None).kl == [math.inf]


@pytest.mark.parametrize(("name", "changes"), [
    ("Llama", {}), ("Qwen3", {}),
    # Layers with a window, which outgrow it and stay with the library, among others.
    ("Gemma2", {"sliding_window": 32, "query_pre_attn_scalar": 16}),
])
def test_full_is_dense(name: str, changes: dict[str, object]) -> None:
    """And what is called dense is what one forward over the whole text says."""
    model, windows = model_of(name, **changes), windows_of(2)
    if name == "Gemma2":
        model.set_attn_implementation("eager")  # The library's sdpa leaves its soft-cap out.
    scores = score_windows(setup_of(model), windows, SCORED, [["full", SINKS]], nothing, Failures())
    with torch.no_grad():
        for window, score in zip(windows, scores["dense"]):
            rows = torch.tensor([window.ids], device=DEVICE)
            wanted = model(rows).logits[0].log_softmax(-1).cpu()[range(200 - SCORED - 1, 199), window.ids[-SCORED:]]
            torch.testing.assert_close(-torch.tensor(score.loss), wanted, atol=2e-4, rtol=2e-4, check_dtype=False)
    full, sinks = (summary(name, scores[name], scores["dense"], 0) for name in ("full", SINKS))
    assert full["kl_max"] < NOISE and full["same_token"] == 1 and full["whole"]
    assert full["perplexity_ratio"] == pytest.approx(1, abs=10 * math.sqrt(NOISE))
    assert sinks["kl_mean"] > 1e-2 and sinks["kl_max"] >= sinks["kl_p99"] > 1000 * full["kl_max"]
    assert sinks["attended"] < 0.2 and sinks["perplexity_ratio"] != pytest.approx(1, abs=1e-3)


def test_what_is_attended_is_counted() -> None:
    """A window of 4 + 8 tokens among 193 to 199; the page that is being filled is attended whole."""
    codes = "exact | int4 | top_k=16 | near=0"
    with under(setup_of(model_of()), [SINKS, "full", codes]) as subject:
        sinks, full, chosen = (read(subject, windows_of(1)[0], policy)[1] for policy in (SINKS, "full", codes))
    assert 12 / 199 <= sinks.attended <= (12 + 32) / 193 and not sinks.whole
    assert sinks.bytes == pytest.approx(sinks.attended) and sinks.choice == 0
    assert full.whole and full.bytes == pytest.approx(1)
    # Of each key, half a byte a channel and 4 more.
    each = model_of().config.head_dim
    assert chosen.choice == pytest.approx((each / 2 + 4) / (2 * each * (4 if DEVICE == "cpu" else 2)), rel=0.1)
    assert chosen.bytes == pytest.approx(chosen.attended + chosen.choice)
    with dense(setup_of(model_of())) as subject:
        assert read(subject, windows_of(1)[0], "dense")[1] is None


@pytest.mark.parametrize("policy", [SINKS, "exact | int4 | top_k=8 | near=0", "lfps", "pages:pages=2 | near=0"])
def test_rows_at_once_are_rows_one_by_one(policy: str) -> None:
    """Also of a sequence that forks from a prompt which another policy read."""
    with under(setup_of(model_of()), ["topk", policy] if policy == "lfps" else ["full", policy]) as subject:
        (got, at_once), (want, single) = (read(subject, windows_of(1)[0], policy, rows) for rows in (None, 1))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    assert at_once == single
    with under(setup_of(model_of()), [policy]) as subject:
        torch.testing.assert_close(got, read(subject, windows_of(1)[0], policy)[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("chunk", [2, 3, 64, 193, 4096])
def test_prompts_in_parts(chunk: int) -> None:
    """However a prompt is cut, no part of it is a single token, which would choose as the policy says."""
    with under(setup_of(model_of(), chunk), [SINKS]) as subject:
        got = read(subject, windows_of(1)[0], SINKS)[0]
    with under(setup_of(model_of(), 4096), [SINKS]) as subject:
        torch.testing.assert_close(got, read(subject, windows_of(1)[0], SINKS)[0], atol=1e-3, rtol=1e-3)


def test_the_floor() -> None:
    """How many times its KL that of others is; of nothing it is none."""
    window, wanted = Window(0, [0, 1]), torch.tensor([[0.0, 1.0]])
    scores = {name: [compare(window, wanted, wanted + torch.tensor([[0.0, off]]), None)]
              for name, off in (("dense", 0.0), ("full", 0.1), (SINKS, 0.3))}
    dense_, full, sinks = (each["kl_over_floor"] for each in summaries(scores, 0))
    assert (dense_, full) == (0, 1) and 8 < sinks < 10
    del scores["full"]
    assert [each["kl_over_floor"] for each in summaries(scores, 0)] == [None, None]


def test_windows_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of dense attention's logits are kept at once, and nothing comes of that."""
    setup, windows = setup_of(model_of()), windows_of(3)
    told: list[str] = []
    want = score_windows(setup, windows, SCORED, [[SINKS]], told.append, Failures())
    assert told == ["dense"] * 3 + [SINKS] * 3
    monkeypatch.setattr(texts, "_KEPT_BYTES", 2 * SCORED * VOCABULARY * 4)
    told.clear()
    assert score_windows(setup, windows, SCORED, [[SINKS]], told.append, Failures()) == want
    assert told == ["dense"] * 2 + [SINKS] * 2 + ["dense", SINKS]


def test_checks() -> None:
    setup = setup_of(model_of())
    check(setup, ["full"], 500)
    with pytest.raises(OutOfCapacity, match="larger --host-bytes"):
        check(Setup(setup.model, 64, 1 << 17, {**setup.options, "threads": 1}), ["full"], 500)
    with pytest.raises(InvalidArgument, match="nonesuch"):
        check(setup, ["nonesuch"], 500)
    check(setup, ["full"], 500)  # The model is as it was.


def test_policies_share_engines() -> None:
    """But for those that want digests of another kind."""
    arkvale, quest = "pages:digest=cuboid_mean", "pages:digest=box"
    assert groups(setup_of(model_of()), [quest, arkvale, "full", "lfps"]) == [[quest, "full", "lfps"], [arkvale]]
    with pytest.raises(InvalidArgument, match="nonesuch"):
        groups(setup_of(model_of()), ["full", "nonesuch"])


def test_logits_that_are_no_numbers() -> None:
    model = model_of()
    model.lm_head.weight.data[7] = math.nan
    with dense(setup_of(model)) as subject, pytest.raises(InternalError, match="--dtype"):
        read(subject, windows_of(1)[0], "dense")


def test_sequences_end() -> None:
    """The host memory of one window is free for the next."""
    with under(setup_of(model_of()), ["full"]) as subject:
        for window in windows_of(3):
            read(subject, window, "full")
            assert subject.enabled.engine.memory().far_pages_used == 0
