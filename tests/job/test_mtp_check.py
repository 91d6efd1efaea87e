"""The whole check over a fake engine: what fails it and where, what is left out, what is exact, what is found done."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.core.errors import CheckFailed, EngineError, GgufError, InputError
from quantkit.engine.settings import Offload
from quantkit.job.evaluation import Subject, read_subject
from quantkit.job.mtp_check import Candidate, MtpOptions, check_mtp, mtp_path, require_passed, speed_path
from quantkit.job.progress import Silent
from quantkit.job.rundir import RunFolder
from quantkit.spec.json_records import record_from_json
from quantkit.spec.mtp_records import MtpResult
from quantkit.spec.speed_records import SpeedResult
from tests.job import mtp_fakes
from tests.job.mtp_fakes import TEXT, World, protocol
from tests.mtp_factory import headed_model

Check = Callable[..., MtpResult]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    mtp_fakes.install(monkeypatch, found)
    return found


@pytest.fixture
def tier(tmp_path: Path) -> Subject:
    return read_subject(headed_model(tmp_path / "tier.gguf", type_name="Q8_0")[0], "Q8_0")


@pytest.fixture
def base(tmp_path: Path) -> Subject:
    return read_subject(headed_model(tmp_path / "base.gguf")[0], "base")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(path=tmp_path / "run")


@pytest.fixture
def check(run: RunFolder, world: World) -> Check:
    def do(trunk: Subject, head: Subject | None = None, base: Subject | None = None, *settings: str,
           memory_bytes: int | None = None) -> MtpResult:
        return check_mtp(run, protocol(*settings), Candidate.of(trunk, head, base), TEXT, Silent(),
                         MtpOptions(memory_bytes=memory_bytes))

    return do


def speed_of(run: RunFolder, tier: str = "Q8_0") -> SpeedResult:
    return record_from_json(SpeedResult, json.loads(run.record("speed", tier).read_text()))


def test_a_sound_head_passes_and_every_key_is_there(check: Check, tier: Subject, run: RunFolder) -> None:
    result = check(tier)
    require_passed(result)
    assert (result.status, result.first_fork) == ("measured", None)
    assert result.lossless == {"greedy": "identical", "sampled": "identical"}
    assert [a.n_draft for a in result.by_n_draft] == [1, 3]
    assert result.n_drafted == result.by_n_draft[-1].n_drafted
    assert result.rollback is not None
    assert result.rollback.mode == "plain KV"
    held = json.loads(mtp_path(run, "Q8_0").read_text())
    assert {"n_drafted", "n_accepted", "acceptance_rate", "acceptance_by_position", "mean_accepted_len",
            "teacher_forced_acceptance", "lossless", "first_fork", "voided_prompts", "rollback"} <= held.keys()
    assert record_from_json(MtpResult, held) == result


@pytest.mark.slow
def test_devices_are_recorded_and_a_protocol_may_fix_them(run: RunFolder, world: World, tier: Subject) -> None:
    asked = MtpOptions(offload=Offload(n_gpu_layers=20, main_gpu=1, tensor_split=(3.0, 1.0)))
    made = check_mtp(run, protocol(), Candidate.of(tier, None, None), TEXT, Silent(), asked).arithmetic
    assert (made.n_gpu_layers, made.main_gpu, made.tensor_split) == (20, 1, (3.0, 1.0))
    fixed = protocol("eval.offload.fixed=true", "eval.offload.n_gpu_layers=5")
    made = check_mtp(run, fixed, Candidate.of(tier, None, None), TEXT, Silent(), asked).arithmetic
    assert (made.n_gpu_layers, made.main_gpu, made.tensor_split) == (5, 0, ())


def test_texts_and_tokens_are_kept(check: Check, tier: Subject) -> None:
    result = check(tier)
    assert [len(p.tokens) for p in result.prompts] == [8, 8, 8]
    for prompt in result.prompts:
        assert prompt.source.startswith("demo-eval.txt, token ")
        assert len(prompt.greedy.tokens) == len(prompt.sampled.tokens) == 12
        assert prompt.sampled.text == " ".join(map(str, prompt.sampled.tokens))


def test_one_wrong_token_accepted_fails_at_its_place(check: Check, tier: Subject, world: World) -> None:
    world.right = lambda position: False
    world.wrong_at = 8 + 5  # the sixth generated token: prompts have 8
    result = check(tier)
    assert result.first_fork is not None
    assert (result.first_fork.position, result.first_fork.prompt, result.first_fork.verdict) == (5, 0, "defect")
    assert result.first_fork.margin is not None
    assert result.lossless == {"greedy": "defect", "sampled": "defect"}
    with pytest.raises(CheckFailed, match=r"not lossless: greedy text with drafts of 3 .* at token 5 after prompt 0"):
        require_passed(result)


def test_a_state_that_is_not_rolled_back_is_a_defect(check: Check, tier: Subject, world: World) -> None:
    world.trunk = {"forgets": False}
    result = check(tier)
    assert result.lossless["greedy"] == "defect"
    assert result.first_fork is not None
    assert result.first_fork.shape_difference == 0.0
    assert (result.first_fork.difference or 0) > 1


@pytest.mark.slow
def test_a_fork_that_batch_shapes_explain_is_a_near_tie_and_passes(check: Check, tier: Subject, world: World) -> None:
    world.trunk = {"shape_noise": 0.6}
    result = check(tier)
    assert set(result.lossless.values()) == {"near-tie"}
    assert result.first_fork is not None
    assert result.first_fork.verdict == "near-tie"
    assert result.first_fork.margin is not None
    assert result.first_fork.margin < 1.3
    require_passed(result)


def test_a_memory_that_cannot_roll_back_is_told_and_not_measured(check: Check, tier: Subject, world: World, run: RunFolder) -> None:
    world.trunk = {"can_roll_back": False}
    with pytest.raises(EngineError, match="cannot be rolled back"):
        check(tier)
    assert not mtp_path(run, "Q8_0").exists()


def test_a_head_that_is_never_right_is_dead_though_the_text_is_right(check: Check, tier: Subject, world: World) -> None:
    world.right, world.teacher_right = (lambda position: False), {"tier.gguf": 0.0}
    result = check(tier)
    assert set(result.lossless.values()) == {"identical"}
    assert (result.n_accepted, result.acceptance_rate) == (0, 0.0)
    with pytest.raises(CheckFailed, match="dead head") as caught:
        require_passed(result)
    assert caught.value.exit_code == 1


@pytest.mark.slow
def test_drafts_that_are_never_accepted_are_a_dead_head_even_where_first_guesses_are_right(check: Check, tier: Subject,
                                                                                         world: World) -> None:
    world.right = lambda position: False
    with pytest.raises(CheckFailed, match=r"dead head: none of \d+ drafted tokens was accepted"):
        require_passed(check(tier))


@pytest.mark.slow
def test_a_head_far_under_the_unquantized_one_is_dead(check: Check, tier: Subject, base: Subject, world: World) -> None:
    world.teacher_right = {"tier.gguf": 0.3, "base.gguf": 0.9}
    result = check(tier, None, base)
    assert result.reference is not None
    assert result.reference.teacher_forced_acceptance.n == result.teacher_forced_acceptance.n  # type: ignore[union-attr]
    assert result.reference.head.type == "BF16"
    assert result.reference.acceptance.n_drafted > 0
    with pytest.raises(CheckFailed, match="the unquantized head's in"):
        require_passed(result)


@pytest.mark.slow
def test_the_bases_own_head_is_not_compared_with_itself(check: Check, tier: Subject, base: Subject) -> None:
    assert check(tier, base, base).reference is None


def test_error_of_the_heads_tensors_is_told(check: Check, tier: Subject, base: Subject) -> None:
    errors = {loss.name: (loss.type, loss.relative_error) for loss in check(tier, None, base).head_errors}
    kind, error = errors["blk.2.nextn.eh_proj.weight"]
    assert kind == "Q8_0"
    assert 0 < error < 0.01
    assert errors["blk.2.nextn.enorm.weight"] == ("F32", 0.0)


def test_without_a_head_nothing_applies_and_the_trunk_is_still_timed(check: Check, tmp_path: Path, run: RunFolder) -> None:
    result = check(read_subject(headed_model(tmp_path / "bare.gguf", n_nextn=0)[0], "bare"))
    assert (result.status, result.reason) == ("not applicable", "no MTP head")
    assert (result.acceptance_rate, result.n_drafted, result.teacher_forced_acceptance, result.lossless) == (None, None, None, {})
    speed = speed_of(run, "bare")
    assert (speed.drafts, speed.best_n_draft, speed.draft_peak_memory_bytes) == ((), None, None)
    assert speed.plain.decode_tokens_per_s == 1.0
    assert speed.plain.peak_memory_bytes > 0
    require_passed(result)


@pytest.mark.parametrize(("changes", "words"), [
    ({"arch": "llama"}, "llama.cpp has no draft graph for the architecture llama"),
    ({"n_nextn": 2}, "llama.cpp drafts with 1 NextN block of the architecture qwen35, and this file has 2"),
])
def test_heads_that_llama_cpp_cannot_run_are_refused_by_name(check: Check, tmp_path: Path, changes: dict[str, int],
                                                            words: str) -> None:
    model = headed_model(tmp_path / "odd.gguf", **changes)[0]  # type: ignore[arg-type]
    result = check(read_subject(model, "odd"))
    assert result.status == "not applicable"
    assert words in (result.reason or "")
    assert result.acceptance_rate is None


@pytest.mark.parametrize("missing", ["key", "count", "tensors"])
def test_a_head_that_is_half_there_is_refused(tmp_path: Path, missing: str) -> None:
    changes = {"key": {"metadata": {"qwen35.nextn_predict_layers": None}}, "count": {"metadata": {"qwen35.block_count": 2}},
               "tensors": {"n_nextn": 0, "metadata": {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 3}}}[missing]
    subject = read_subject(headed_model(tmp_path / "half.gguf", **changes)[0], "half")  # type: ignore[arg-type]
    with pytest.raises(GgufError, match=r"nextn|block_count"):
        Candidate.of(subject)


def test_a_head_of_another_model_is_refused(tier: Subject, tmp_path: Path) -> None:
    other = read_subject(headed_model(tmp_path / "other.gguf", arch="qwen35moe")[0], "head")
    with pytest.raises(InputError, match="expected architecture qwen35, found qwen35moe"):
        Candidate.of(tier, other)


def test_looping_text_voids_its_prompt_and_says_so(check: Check, tier: Subject, world: World, run: RunFolder) -> None:
    world.loops = True
    result = check(tier)
    assert result.voided_prompts == (0, 1, 2)
    assert result.acceptance_rate is None
    assert "repeats itself" in (result.reason or "")
    assert all(p.sampled.voided and p.sampled.tokens == (5,) * 12 for p in result.prompts)
    assert all((p.sampled.repeat_share or 0) > 0.8 for p in result.prompts)
    speed = speed_of(run)
    assert (speed.n_prompt, speed.n_voided, speed.best_n_draft) == (0, 3, None)
    assert [d.speedup.reason for d in speed.drafts] == ["no prompt left to time"] * 2


def test_fixed_times_give_exact_speedups(check: Check, tier: Subject, world: World, run: RunFolder) -> None:
    """A trunk's decode takes 1 s whatever its length, a head's 0.25 s, and the head is always right."""
    world.right = lambda position: True
    result = check(tier, None, None, "mtp.temperature=0.001", "mtp.top_k=1")
    assert result.acceptance_rate == 1.0
    speed = speed_of(run)
    one, three = speed.drafts
    # 12 tokens alone: 12 s. By twos: 6 steps of 1 + 0.25 + 0.25. By fours: 3 steps of 1 + 3 * 0.25 + 0.25.
    assert [one.speedup.value, three.speedup.value] == pytest.approx([12 / 9, 12 / 6])
    assert [three.speedup.lo, three.speedup.hi] == pytest.approx([2.0, 2.0])
    assert [one.step_cost, three.step_cost] == pytest.approx([1.5, 2.0])
    assert (one.mean_accepted_len, three.mean_accepted_len) == (2.0, 4.0)
    assert [one.break_even_acceptance, three.break_even_acceptance] == pytest.approx([0.5, 1 / 3])
    assert speed.best_n_draft == 3
    assert speed.plain.noise.value == pytest.approx(1.0)
    assert speed.plain.decode_tokens_per_s == pytest.approx(1.0)
    assert speed.plain.prompt_tokens_per_s == pytest.approx(7.0)  # 7 of 8 prompt tokens in one decode
    assert three.prompt_tokens_per_s == pytest.approx(7 / 1.25)
    assert three.wall_speedup.value == pytest.approx((12 + 1) / (6 + 1.25))


def test_a_head_that_costs_more_than_it_gives_is_best_left_off(check: Check, tier: Subject, world: World, run: RunFolder) -> None:
    world.draft_seconds = 5.0
    check(tier)
    assert speed_of(run).best_n_draft == 0


@pytest.mark.slow
def test_no_time_is_in_the_bundles_record(check: Check, tier: Subject, world: World, run: RunFolder) -> None:
    first = check(tier)
    before = mtp_path(run, "Q8_0").read_bytes()
    run.record("speed", "Q8_0").unlink()
    world.plain_seconds = 7.0
    assert check(tier) == first
    assert mtp_path(run, "Q8_0").read_bytes() == before
    assert speed_of(run).plain.decode_tokens_per_s == pytest.approx(1 / 7)


@pytest.mark.slow
def test_a_check_that_stands_is_not_made_again(check: Check, tier: Subject, world: World) -> None:
    check(tier)
    n_opened = len(world.opened)
    check(tier)
    assert len(world.opened) == n_opened
    check(tier, None, None, "mtp.seed=9")
    assert len(world.opened) > n_opened


@pytest.mark.slow
def test_the_text_does_not_depend_on_what_the_head_says(check: Check, tier: Subject, world: World, run: RunFolder) -> None:
    first = check(tier)
    mtp_path(run, "Q8_0").unlink()
    world.right = lambda position: position % 2 == 0
    second = check(tier)
    assert [p.sampled for p in first.prompts] == [p.sampled for p in second.prompts]
    assert first.n_accepted != second.n_accepted


def test_an_arm_that_does_not_repeat_itself_is_told(check: Check, tier: Subject, world: World, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    from quantkit.engine.draft_session import generate

    n_calls = 0

    def shaky(*arguments: object, **named: object) -> object:
        nonlocal n_calls
        n_calls += 1
        found = generate(*arguments, **named)  # type: ignore[arg-type]
        return dataclasses.replace(found, tokens=(n_calls, *found.tokens[1:]))

    monkeypatch.setattr("quantkit.job.mtp_runs.generate", shaky)
    result = check(tier)
    assert set(result.lossless.values()) == {"not repeatable"}
    with pytest.raises(CheckFailed, match="does not repeat itself"):
        require_passed(result)


@pytest.mark.slow
def test_where_memory_is_short_one_way_is_closed_before_the_other_opens(check: Check, tier: Subject, world: World) -> None:
    first = check(tier)
    world.opened.clear()
    short = check(tier, None, None, "mtp.n_warmup=2", memory_bytes=1)
    assert [p.sampled for p in short.prompts] == [p.sampled for p in first.prompts]
    open_now: set[str] = set()
    for event in world.opened:
        what = event.removeprefix("close ").split()[0]
        if event.startswith("close"):
            open_now.discard(what)
        else:
            open_now.add(what)
        assert len(open_now) <= 1, event


def test_the_prompt_left_out_is_an_ablation_with_its_own_counts(check: Check, tier: Subject) -> None:
    result = check(tier)
    assert result.without_prompt is not None
    assert result.without_prompt.n_draft == 3
    assert result.without_prompt.n_step > 0


def test_drafts_that_do_not_fit_a_micro_batch_are_refused(check: Check, tier: Subject) -> None:
    with pytest.raises(InputError, match=r"expected mtp.n_ubatch of at least 17, for drafts of 12, got 16"):
        check(tier, None, None, "mtp.n_draft=[12]")


def test_a_check_stands_inside_its_run_and_a_cell_of_the_matrix_apart(run: RunFolder) -> None:
    assert mtp_path(run, "Q8_0") == run.path / "mtp" / "Q8_0.json"
    assert speed_path(run, "Q8_0") == run.parts / "speed" / "Q8_0.json"
    assert mtp_path(run, "matrix/Q8_0+BF16") == run.path / "mtp" / "matrix" / "Q8_0+BF16.json"
    assert speed_path(run, "matrix/Q8_0+BF16") == run.parts / "speed" / "matrix" / "Q8_0+BF16.json"
    for name in ("../out", "matrix/../../out", "a/b", ".."):
        with pytest.raises(InputError, match="expected the name of a tier"):
            mtp_path(run, name)
