"""The commands `asyncrl inspect` and `asyncrl staleness` on journals that the buffer wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from asyncrl_cli.data.tokenizer import CHARACTERS, EOS, PAD, UNK
from asyncrl_cli.inspect.decoding import Decoder
from asyncrl_cli.inspect.pages import WIDTH
from asyncrl_cli.records.groups import Outcome
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.runs.directory import RunDirectory
from tests.journal.recorded_run import EpisodeRun, RecordedRun, make_run, settings

pytestmark = pytest.mark.slow

PAGES = (
    ("inspect", "buffer"),
    ("inspect", "buffer", "--limit", "100"),
    ("inspect", "buffer", "--group", "2"),
    ("inspect", "buffer", "--rollout", "2-1"),
    ("inspect", "run"),
    ("staleness",),
)
TEXT = "3+4 is 7,\nso: 7"


def character_ids(text: str) -> list[int]:
    return [3 + CHARACTERS.index(char) for char in text] + [1]


def characters() -> Any:
    """The backend of ``character_tokenizer``, without transformers."""
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate((PAD, EOS, UNK, *CHARACTERS))}, unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNK])
    return tokenizer


def byte_pairs(*texts: str) -> Any:
    """A byte-level BPE tokenizer, as most language models have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """Run `run-1` after its driver was killed: four steps trained, a fifth taken, a failed group, running groups."""
    directory = make_run(tmp_path / "runs", phase="running", step=4, steps=1000, version=4)
    (directory.path / "model_stub").mkdir()
    characters().save(str(directory.path / "model_stub" / "tokenizer.json"))
    run = RecordedRun(
        directory.path / "journal.db",
        monkeypatch,
        settings(max_staleness=2),
        lambda g: 3.0 + 4 * (g % 3),
        concurrency=5,
        response=character_ids(TEXT),
    )
    for _ in range(4):
        run.step()
    run.take()
    failed, growing = run.book.ledger.running[-2:]
    run.book.score([Outcome(f"{failed}-0", RewardFailure("the reward raised KeyError: 'answer'"))])
    begun = run.rollout(growing, 0)
    run.book.grown(begun.segments(begun.rollout_id)[:1])
    run.commit()
    return run


def write(run: RecordedRun, sql: str) -> None:
    run.book.journal.commit([(sql, ())])


# -- every page


@pytest.mark.parametrize("arguments", PAGES)
def test_pages_fit_and_are_json_too(run: RecordedRun, asyncrl: Any, arguments: tuple[str, ...]) -> None:
    code, out, err = asyncrl(*arguments)
    assert (code, err) == (0, "")
    assert out.isascii() or "…" in out
    assert max(map(len, out.splitlines())) <= WIDTH
    assert "\x1b" not in out
    code, out, _ = asyncrl(*arguments, "--json")
    assert code == 0
    assert json.loads(out)["run"] == "run-1"


@pytest.mark.parametrize("arguments", PAGES)
def test_without_a_run_or_a_journal(asyncrl: Any, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert asyncrl(*arguments) == (
        2,
        "",
        "error: there is no run yet\n --> runs\nhint: start one: asyncrl train SPEC\n",
    )
    make_run(tmp_path / "runs", phase="failed", reason="no memory")
    code, out, err = asyncrl(*arguments)
    path = tmp_path / "runs" / "run-1" / "journal.db"
    assert (code, err) == (
        1,
        f"error: there is no journal\n --> {path}\nhint: a run has one from its first group on; "
        "if this run has trained, restore the file from a copy\n".replace(f"{tmp_path}/", ""),
    )
    assert ("no memory" in out) == (arguments == ("inspect", "run")), "what is known is shown"
    path.touch()
    assert "error: this is not a journal of asyncrl\n" in asyncrl(*arguments)[2]
    path.write_bytes(b"no journal at all" * 100)
    code, _, err = asyncrl(*arguments)
    assert code == 1
    assert "file is not a database" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        "inspect buffer --state runing",
        "inspect buffer --rollout 12",
        "inspect buffer --group 1 --state running",
        "inspect buffer --group 1 --rollout 1-0",
        "inspect buffer --limit 0",
        "inspect buffers",
        "replay --from 5 --to 3",
    ],
)
def test_wrong_usage_is_refused_with_a_hint(run: RecordedRun, asyncrl: Any, arguments: str) -> None:
    code, out, err = asyncrl(*arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith("Usage: asyncrl ")


def test_runs_are_found_by_name_prefix_and_path(run: RecordedRun, asyncrl: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "other", "run-2")
    pages = {
        asyncrl("inspect", "run", *which)[1]
        for which in (("run-1",), ("ru",), ("runs/run-1",), ("latest",), ("--runs-dir", str(tmp_path / "runs")))
    }
    assert len({page.replace(f"{tmp_path}/", "") for page in pages}) == 1
    code, _, err = asyncrl("staleness", "run-2")
    assert (code, err) == (2, "error: no run is called 'run-2'\n --> runs\nhint: list the runs: asyncrl runs\n")


# -- inspect buffer


def test_inspect_buffer_summarizes_the_buffer(run: RecordedRun, asyncrl: Any) -> None:
    out = asyncrl("inspect", "buffer")[1]
    lines = out.splitlines()
    assert lines[:2] == ["run      run-1, died", "progress 5 of 1000 batches taken, weight version 4"]
    counts = run.book.ledger.counts()
    rows = {line.split()[0]: line.split() for line in lines[5:11]}
    assert rows["running"][1:3] == [str(counts.running), "0"]
    assert rows["running"][3] == str(len(TEXT) + 1), "tokens so far"
    finished = {"finished": str(counts.finished), "taken": "2", "trained": "8", "rejected": "1"}
    assert {state: rows[state][1] for state in finished} == finished
    assert rows["rejected"][2:] == ["failed", "1"]
    assert "  version  staleness  deadline  running  finished" in lines


def test_a_rollout_shows_text_versions_logprobs_and_reward(run: RecordedRun, asyncrl: Any) -> None:
    crossed = next(
        rollout
        for group_id in range(20)
        for rollout in json.loads(asyncrl("inspect", "buffer", "--group", str(group_id), "--json")[1])["rollouts"]
        if len(rollout["segments"]) == 2 and rollout["reward"] == 0
    )
    parts = [segment["text"] for segment in crossed["segments"]]
    assert "".join(parts) == f"{TEXT}<eos>"
    assert all(len(segment["ids"]) == len(segment["logprobs"]) for segment in crossed["segments"])
    out = asyncrl("inspect", "buffer", "--rollout", crossed["rollout"])[1]
    assert f"rollout {crossed['rollout']}: reward 0; 16 tokens, ended by the model" in out
    for segment in crossed["segments"]:
        assert f"  version {segment['version']}, {len(segment['ids'])} tokens, log-prob mean " in out
    assert '| "3" -0.00 "+" -0.25 "4" -0.50' in out
    assert '"<eos>" -3.75' in out
    assert '{"answer": "7"}' in out


def test_an_episode_shows_context_apart_from_sampled_text(
    asyncrl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_run(tmp_path / "runs")
    (directory.path / "model_stub").mkdir()
    characters().save(str(directory.path / "model_stub" / "tokenizer.json"))
    monkeypatch.setattr(EpisodeRun, "asked", character_ids("3+4")[:-1])
    monkeypatch.setattr(EpisodeRun, "tool", character_ids("=7")[:-1])
    path = directory.path / "journal.db"
    run = EpisodeRun(path, monkeypatch, settings(), lambda _: 3.0, response=character_ids("ask:ans"))
    run.step()
    lines = asyncrl("inspect", "buffer", "--rollout", "0-1")[1].splitlines()
    assert "prompt      of an episode: see the context of its rollouts" in lines
    at = next(at for at, line in enumerate(lines) if line.startswith("rollout 0-1"))
    assert lines[at:] == [
        "rollout 0-1: reward 1; 16 tokens, ended by the model",
        "  metrics: seconds 0.5, turns 3",
        "  context, 3 tokens",
        "  > 3+4",
        "  version 0, 4 tokens, log-prob mean -0.250, lowest -0.250",
        "    ask:",
        '    | "a" -0.25 "s" -0.25 "k" -0.25 ":" -0.25',
        "  context, 2 tokens",
        "  > =7",
        "  version 0, 4 tokens, log-prob mean -0.250, lowest -0.250",
        "    ans<eos>",
        '    | "a" -0.25 "n" -0.25 "s" -0.25 "<eos>" -0.25',
        "  branch 1: another conversation of the same rollout",
        "  context, 3 tokens",
        "  > 3+4",
        "  version 0, 8 tokens, log-prob mean -0.250, lowest -0.250",
        "    ask:ans<eos>",
        '    | "a" -0.25 "s" -0.25 "k" -0.25 ":" -0.25 "a" -0.25 "n" -0.25 "s" -0.25 "<eos>" -0.25',
    ]
    (document,) = json.loads(asyncrl("inspect", "buffer", "--rollout", "0-1", "--json")[1])["rollouts"]
    assert document["metrics"] == {"turns": 3, "seconds": 0.5}
    parts = [(part["branch"], part["start"], part["version"], part["text"]) for part in document["segments"]]
    assert parts == [
        *((0, 0, None, "3+4"), (0, 3, 0, "ask:"), (0, 7, None, "=7"), (0, 9, 0, "ans<eos>")),
        *((1, 0, None, "3+4"), (1, 3, 0, "ask:ans<eos>")),
    ]
    (directory.path / "model_stub" / "tokenizer.json").unlink()
    out = asyncrl("inspect", "buffer", "--rollout", "0-1")[1]
    assert f"  > {' '.join(map(str, EpisodeRun.asked))}\n" in out


def test_a_group_says_why_it_was_rejected(run: RecordedRun, asyncrl: Any) -> None:
    listed = asyncrl("inspect", "buffer", "--state", "rejected")[1].splitlines()
    assert listed[0].split() == [
        "group",
        "prompt",
        "state",
        "version",
        "staleness",
        "step",
        "ended",
        "tokens",
        "reward",
        "age",
    ]
    group_id, _, *state = listed[1].split()[:4]
    assert state == ["rejected:", "failed"]
    out = asyncrl("inspect", "buffer", "--group", group_id)[1]
    assert "state       rejected\nreason      failed\n" in out
    assert f"rollout {group_id}-0: failed; 0 tokens, no end yet\n    the reward raised KeyError: 'answer'" in out


def test_masked_rollouts_are_named(run: RecordedRun, asyncrl: Any) -> None:
    group_id = run.book.ledger.running[-1]
    run.book.record([run.rollout(group_id, 1)], [Outcome(f"{group_id}-1", Scored(None, {"refused": 1.0}))])
    run.commit()
    assert f"rollout {group_id}-1: masked, its reward is None;" in asyncrl("inspect", "buffer", "--group", group_id)[1]
    document = json.loads(asyncrl("inspect", "buffer", "--rollout", f"{group_id}-1", "--json")[1])
    assert (document["rollouts"][0]["reward"], document["rollouts"][0]["masked"]) == (None, True)
    assert run.book.opening().groups[-1].scored == {1}


def test_state_and_limit_select_groups(run: RecordedRun, asyncrl: Any) -> None:
    def listed(*arguments: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(asyncrl("inspect", "buffer", *arguments, "--json")[1])
        return document

    everything, few = listed("--limit", "100"), listed("--limit", "2")
    assert few["more"] and not everything["more"]
    assert few["groups"] == everything["groups"][:2]
    assert {group["state"] for group in listed("--state", "taken")["groups"]} == {"taken"}
    assert {group["step"] for group in listed("--state", "taken")["groups"]} == {5}, "steps count from 1"
    assert asyncrl("inspect", "buffer", "--state", "requeued")[:2] == (0, "no group of run-1 matches\n")


def test_unknown_groups_and_rollouts_are_refused(run: RecordedRun, asyncrl: Any) -> None:
    code, out, err = asyncrl("inspect", "buffer", "--group", "1000")
    assert (code, out) == (2, "")
    assert err.startswith("error: there is no group 1000\n --> run-1\nhint: ")
    assert asyncrl("inspect", "buffer", "--rollout", "1000-0")[0] == 2
    assert (
        asyncrl("inspect", "buffer", "--rollout", "0-9")[2] == "error: rollout 0-9 has no record yet\n --> run-1\n"
        "hint: see the records of its group: asyncrl inspect buffer run-1 --group 0\n"
    )


def test_token_ids_are_shown_if_there_is_no_tokenizer(run: RecordedRun, asyncrl: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runs/run-1"
    (folder / "model_stub").rename(tmp_path / "model")
    out = asyncrl("inspect", "buffer", "--rollout", "0-0")[1]
    first = character_ids(TEXT)[0]
    assert f"    | {first} -0.00 " in out
    assert "there is no tokenizer.json" in out
    # A saved model is used in its own folder, and has no model_stub.
    (folder / "spec.yaml").write_text(f"model:\n  path: {tmp_path / 'model'}\n")
    assert "    3+4 is 7,\n    so: 7<eos>" in asyncrl("inspect", "buffer", "--rollout", "0-0")[1]


def test_a_rollout_with_dropped_tokens_says_so(run: RecordedRun, asyncrl: Any) -> None:
    write(run, "DELETE FROM segments WHERE group_id = 0")
    assert "(its tokens were dropped: journal.keep)" in asyncrl("inspect", "buffer", "--group", "0")[1]
    assert "tokens of some steps were dropped" in asyncrl("staleness")[1]


# -- inspect run


def test_inspect_run_shows_the_history(run: RecordedRun, asyncrl: Any, tmp_path: Path) -> None:
    journal = run.book.journal
    journal.checkpointed(2, "step-000002", 1.5)
    journal.checkpoint_removed(2)
    journal.checkpointed(4, "step-000004", 1.5)
    (tmp_path / "runs" / "run-1" / "checkpoints" / "step-000004").mkdir(parents=True)
    journal.failed("killed", "engine-0", "SIGKILL\nlogs say more")
    result = {"mean_reward": 0.5, "mean_length": 21.5, "prompts": 256, "oldest": 0, "newest": 0}
    journal.evaluated({"step": 0, "kind": "greedy", "accuracy": 0.25, **result})
    run.commit()
    run.crash(100)
    lines = asyncrl("inspect", "run")[1].splitlines()
    assert lines[0] == "run      run-1, died, step 4 of 1000, weight version 4"
    assert "command  asyncrl train spec.yaml" in lines
    assert "code     asyncrl 0.1, Python 3.11.2" in lines
    starts = lines.index("starts")
    rows = [line.split() for line in lines[starts + 2 : starts + 4]]
    assert [(row[2], row[5], row[6]) for row in rows] == [("train", "0", "0"), ("resume", "5", "4")]
    failures = lines.index("failures: 1 killed")
    assert lines[failures + 1].endswith("  engine-0: SIGKILL")
    assert lines[failures + 2] == "  logs say more"
    assert "trained  4 steps in 40 s, 10 s per step" in lines
    assert "tokens   trained 400 (10/s), generated 800 (20/s)" in lines
    assert "time     trainer busy 50%, engines busy 75%, engines paused 25%" in lines
    row = lines[lines.index("evaluations") + 2].split()
    assert row[2:5] == ["0", "greedy", "0.25"]
    document = json.loads(asyncrl("inspect", "run", "--json")[1])
    assert document["phase"] == "died"
    assert document["history"]["work"]["trained_tokens"] == 400
    assert [row["after_step"] for row in document["history"]["checkpoints"]] == [2, 4]
    assert len(document["history"]["starts"]) == 2


def test_pages_show_that_a_run_learns_nothing(run: RecordedRun, asyncrl: Any) -> None:
    assert "health   no rule was broken in 4 steps" in asyncrl("inspect", "run", "run-1")[1]
    assert json.loads(asyncrl("inspect", "run", "--json")[1])["findings"] == []
    write(run, "UPDATE batches SET metrics = json_set(metrics, '$.\"response/truncated_ratio\"', 0.9)")
    lines = asyncrl("inspect", "run")[1].splitlines()
    assert any(line.startswith("health   90% of the responses were truncated") for line in lines)
    (finding,) = json.loads(asyncrl("inspect", "run", "--json")[1])["findings"]
    assert (finding["rule"], finding["first_step"], finding["last_step"]) == ("truncated_responses", 1, None)


def test_pages_agree_on_the_version_that_engines_serve(run: RecordedRun, asyncrl: Any, tmp_path: Path) -> None:
    RunDirectory(tmp_path / "runs/run-1").update(version=5)  # the trainer's version: its publish is in flight
    for page in ("run", "buffer"):
        assert re.search(r"weight version 4$", asyncrl("inspect", page)[1], re.MULTILINE), page


def test_a_run_that_is_driven_is_running(run: RecordedRun, asyncrl: Any, tmp_path: Path) -> None:
    driver = RunDirectory(tmp_path / "runs/run-1")
    driver.lock()
    for arguments in PAGES[:1] + PAGES[4:]:
        assert asyncrl(*arguments)[1].startswith("run      run-1, running")
    driver.unlock()


# -- staleness


def test_the_bound_is_verified(run: RecordedRun, asyncrl: Any) -> None:
    code, out, _ = asyncrl("staleness")
    assert code == 0
    assert "proof    the bound held: 10 groups have a staleness of 0 to 2 versions,\n         and none of " in out
    document = json.loads(asyncrl("staleness", "--json")[1])
    assert document["held"]
    assert [step["first_step"] for step in document["steps"]] == [1, 2, 3, 4, 5]
    assert document["all"]["groups"].keys() <= {"0", "1", "2"}
    assert 0 < document["all"]["crossed"] < document["all"]["rollouts"]


def test_a_violated_bound_ends_with_1(run: RecordedRun, asyncrl: Any) -> None:
    write(run, "UPDATE groups SET version = 0 WHERE step = 4")
    code, out, _ = asyncrl("staleness")
    assert code == 1
    assert "VIOLATED the guarantee does not hold: 2 rows violate it\n  step 5, group " in out
    assert "admitted at version 0, trained at version 4: 4 versions later, and the bound is 2" in out
    code, out, _ = asyncrl("staleness", "--json")
    assert code == 1
    assert [row["step"] for row in json.loads(out)["violations"]] == [5, 5]


def test_late_groups_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asyncrl: Any) -> None:
    directory = make_run(tmp_path / "runs")
    of = settings(on_stale="train")
    run = RecordedRun(directory.path / "journal.db", monkeypatch, of, lambda g: 40.0 if g == 0 else 3.0, concurrency=4)
    for _ in range(6):
        run.step()
    code, out, _ = asyncrl("staleness")
    assert code == 0
    assert "late     1 group trained past the bound, which on_stale: train allows" in out


def test_long_runs_fit_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asyncrl: Any) -> None:
    directory = make_run(tmp_path / "runs")
    of = settings(max_staleness=17)
    run = RecordedRun(directory.path / "journal.db", monkeypatch, of, lambda g: 1.0, concurrency=40)
    for _ in range(61):
        run.step()
    out = asyncrl("staleness")[1]
    assert len(out.splitlines()) < 26
    assert "\n56-60 " in out
    assert "\n61 " in out
    assert max(map(len, out.splitlines())) <= WIDTH


# -- helpers


def test_byte_pairs_are_decoded_across_segments() -> None:
    text = "naïve 🙂 café, naïve 🙂 café 7"
    tokenizer = byte_pairs(text * 3)
    ids = tokenizer.encode(text).ids
    decoder = Decoder(tokenizer)
    assert "".join(decoder.token_texts(ids)) == text
    for cut in range(len(ids) + 1):
        parts = decoder.split_text(ids, [cut, len(ids)])
        assert "".join(parts) == text, "a character that is divided by a boundary belongs to one part"
        assert "\ufffd" not in parts[0]


def test_decoding_drops_only_the_first_space() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "▁7": 1, "▁is": 2, "x": 3}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    decoder = Decoder(tokenizer)
    assert decoder.token_texts([1, 2, 3, 1]) == ["7", " is", "x", " 7"]
    assert decoder.split_text([1, 2, 3, 1], [2, 4]) == ["7 is", "x 7"]
