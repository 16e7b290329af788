"""What a run writes down of its validations, and what it knows of them when it goes on."""

import csv
from pathlib import Path

import numpy as np
import pytest

from tilenet.parallel.swap.statistics import SwapCounts
from tilenet.scores import scores
from tilenet.storage.tensorboard import Scalars
from tilenet.training.folder.log import RunLog
from tilenet.training.scoring import Validated
from tilenet.training.step import StepResult

CLASSES = ["field, wet", "road", "nowhere"]


def found(seed: int) -> Validated:
    rng = np.random.default_rng(seed)
    matrix = rng.integers(1, 1000, (3, 4))
    matrix[2], matrix[:, 2], matrix[0, 1] = 0, 0, 0
    return Validated(float(rng.random()), scores(matrix), 1.25 * seed)


def result(loss: float, rate: float = 0.1) -> StepResult:
    return StepResult(loss, 70.0, rate, 0.5, 0.1, 0.2, SwapCounts(), 0.3, 4096, stop=False)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoint(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_rows_hold_all_scores_to_their_last_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path, CLASSES, "mean_iou", 0)
    log.step(1, result(0.1, 1 / 3))
    one = found(1)
    log.validation(1, one, best=True)
    log.close()
    assert rows_of(tmp_path / "history.csv")[0]["learning_rate"] == "0.33333333333333331"
    (row,) = rows_of(tmp_path / "validation.csv")
    wanted, matrix = one.scores, one.scores["confusion"]
    assert list(row)[:7] == [
        *("step", "loss", "num_pixels", "accuracy", "mean_iou", "mean_f1", "seconds")
    ]
    assert list(row)[7:10] == ["iou_field, wet", "f1_field, wet", "iou_road"]
    assert float(row["loss"]) == one.loss
    for name in ("num_pixels", "accuracy", "mean_iou", "mean_f1"):
        assert float(row[name]) == wanted[name]
    for name, iou, f1 in zip(CLASSES[:2], wanted["iou"], wanted["f1"], strict=False):
        assert (float(row[f"iou_{name}"]), float(row[f"f1_{name}"])) == (iou, f1)
    assert (row["iou_nowhere"], row["f1_nowhere"]) == ("", "")
    cells = rows_of(tmp_path / "confusion.csv")
    assert [[int(v) for v in cell.values()] for cell in cells] == [
        [1, 0, 0, matrix[0][0]],
        [1, 1, 0, matrix[1][0]],
        [1, 1, 1, matrix[1][1]],
    ]
    said = capsys.readouterr().err
    assert f"after step 1: mean IoU {wanted['mean_iou']:.4f}, accuracy " in said
    assert f"road {wanted['iou'][1]:.4f}, nowhere –; 1.2 s; the best so far" in said


@pytest.mark.parametrize("score", ["mean_iou", "loss"])
def test_the_best_is_found_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], score: str
) -> None:
    log = RunLog(tmp_path, CLASSES, score, 0)
    values = {step: found(step % 4 + 1) for step in range(1, 9)}  # 5 to 8 are 1 to 4 again
    for step, one in values.items():
        log.validation(step, one, best=False)
    log.close()
    checkpoint(tmp_path, *values)
    wanted = sorted(values, key=lambda step: values[step].score(score), reverse=score != "loss")
    log = RunLog(tmp_path, CLASSES, score, 8)
    assert log.best() == (wanted[0], values[wanted[0]].score(score))
    assert wanted[0] < wanted[1]
    assert [step for step in range(11) if log.has_validation(step)] == list(values)
    log.close()
    assert "no checkpoint any more" not in capsys.readouterr().err
    # Of steps that are repeated, and of checkpoints that are gone, nothing is known.
    log = RunLog(tmp_path, CLASSES, score, 4)
    assert not log.has_validation(5)
    for step in wanted[:2]:
        (tmp_path / "checkpoints" / f"step-{step:08d}").rmdir()
    left = [step for step in wanted[2:] if step <= 4]
    assert log.best() == (left[0], values[left[0]].score(score))
    log.close()
    of_kept, of_lost = (
        f"{values[step].score(score):.4f} after step {step}" for step in (left[0], wanted[0])
    )
    said = f"no checkpoint any more ({score}: {of_lost}; the best with one: {of_kept}, to which "
    assert capsys.readouterr().err.count(said) == 1
    for checkpoint_of_step in (tmp_path / "checkpoints").iterdir():
        checkpoint_of_step.rmdir()
    assert RunLog(tmp_path, CLASSES, score, 4).best() is None
    assert f"({score}: {of_lost}; none has one); keep" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_left_out_and_never_the_best(tmp_path: Path) -> None:
    log = RunLog(tmp_path, CLASSES, "loss", 0)
    log.validation(1, Validated(float("nan"), found(1).scores, 1.0), best=False)
    checkpoint(tmp_path, 1)
    assert rows_of(tmp_path / "validation.csv")[0]["loss"] == ""
    assert log.best() is None
    log.close()


def test_without_validation_there_are_no_tables_of_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path, CLASSES, None, 0)
    assert log.best() is None
    assert not log.has_validation(1)
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["history.csv"]


def test_scalars_hold_what_the_tables_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[int, dict[str, float | None]]] = []
    monkeypatch.setattr(Scalars, "add", lambda _, step, values: added.append((step, dict(values))))
    log = RunLog(tmp_path, CLASSES, "mean_iou", 6, tensorboard=True)
    log.step(7, result(0.25, 0.125))
    one = found(3)
    log.validation(7, one, best=True)
    log.close()
    (step, first), (also, rest) = added
    assert step == also == 7
    assert first == {"loss": 0.25, "learning_rate": 0.125}
    assert rest["validation/loss"] == one.loss
    assert rest["validation/mean_iou"] == one.scores["mean_iou"]
    assert rest["validation/iou/road"] == one.scores["iou"][1]
    assert rest["validation/f1/field, wet"] == one.scores["f1"][0]
    assert rest["validation/iou/nowhere"] is None


def test_a_run_goes_on_without_scalars_that_find_no_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_room: object,
) -> None:
    log = RunLog(tmp_path, CLASSES, "mean_iou", 0, tensorboard=True)

    monkeypatch.setattr(Scalars, "_write", no_room)
    for step in (1, 2, 3):
        log.step(step, result(0.5))
    log.close()
    assert [row["step"] for row in rows_of(tmp_path / "history.csv")] == ["1", "2", "3"]
    said = capsys.readouterr().err
    assert said.count("No space left on device); training goes on") == 1
    assert said.count("\n") == 1


def test_pixels_of_a_validation_that_was_cut_off_are_not_counted_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is killed between a validation's pixels and its scores, and makes both again."""
    log = RunLog(tmp_path, CLASSES, "mean_iou", 0)
    for step in (1, 2):
        log.step(step, result(0.1))
        log.validation(step, found(step), best=False)
    log.close()
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")}
    scores_of_2 = whole["validation.csv"].splitlines(keepends=True)[-1]
    for length in (0, 1, len(scores_of_2) // 2, len(scores_of_2) - 1):
        cut = whole["validation.csv"].removesuffix(scores_of_2) + scores_of_2[:length]
        (tmp_path / "validation.csv").write_bytes(cut)
        capsys.readouterr()
        log = RunLog(tmp_path, CLASSES, "mean_iou", 2)
        said = f"the last row of {tmp_path / 'validation.csv'} was cut off"
        assert capsys.readouterr().err.count(said) == (length > 0)
        assert not log.has_validation(2)
        log.validation(2, found(2), best=False)
        log.close()
        assert {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")} == whole
