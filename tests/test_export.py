"""A checkpoint's model outside of kettle: the same bits, and nothing half written."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from kettle.checkpoint.contents import StoredTensors
from kettle.checkpoint.export import INDEX, WEIGHTS, write_safetensors
from kettle.checkpoint.filesystem import open_store
from kettle.checkpoint.layout import MARKER
from kettle.checkpoint.marker import read_marker
from kettle.cli.app import run
from kettle.config import RunConfig
from kettle.distributed import Ranks
from kettle.model.build import build_model
from kettle.state.parts import ModelPart
from kettle.train.export import probe_logits
from support.attempts import attempt
from support.checkpoints import committed, tensors_of
from support.experiments import VOCABULARY, noise, tiny
from support.ranks import on_ranks

TOKENS = torch.arange(22).mul(37).remainder(VOCABULARY).view(2, 11)


def model_of(config: RunConfig) -> Qwen2ForCausalLM:
    return build_model(config.experiment.model, seed=3).eval()


def saved(folder: Path, config: RunConfig) -> str:
    """A checkpoint of a model, with as much beside it as an optimizer has."""
    weights = ModelPart(model_of(config)).state_dict()
    moments = {f"{name}.exp_avg": torch.ones_like(weight) for name, weight in weights.items()}
    experiment = config.experiment.model_dump(mode="json")
    name = folder / "tiny-0123" / "step-00000004-g0001-a"
    return committed(name, {"model": weights, "optimizer": moments}, step=4, experiment=experiment)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return tiny(tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path, config: RunConfig) -> str:
    return saved(tmp_path, config)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "exported"


def export(checkpoint: str, out: Path, *options: str) -> int:
    return run(["checkpoints", "export", checkpoint, "--out", str(out), *options])


def loaded(out: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


def test_the_exported_model_computes_the_same_bits(
    checkpoint: str, config: RunConfig, out: Path
) -> None:
    assert export(checkpoint, out) == 0
    assert torch.equal(logits(loaded(out)), logits(model_of(config)))


def trained(ranks: Ranks, config: RunConfig) -> str:
    return attempt(config, noise(), ranks=ranks).last_checkpoint


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_of_any_number_of_ranks_is_exported(
    tmp_path: Path, out: Path, world_size: int
) -> None:
    config = tiny(tmp_path, experiment__total_steps=2, experiment__virtual_ranks=3)
    (checkpoint, *_) = on_ranks(world_size, trained, config)
    assert export(checkpoint, out) == 0
    expected = model_of(config)
    weights = tensors_of(checkpoint)
    ModelPart(expected).load_state_dict(
        {name: weights[f"model.{name}"] for name, _ in expected.named_parameters()}
    )
    assert torch.equal(logits(loaded(out)), logits(expected))


def test_tied_embeddings_are_stored_once(checkpoint: str, out: Path) -> None:
    export(checkpoint, out)
    with safe_open(out / WEIGHTS, framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - it is no mapping


def test_tied_embeddings_are_one_tensor_after_loading(checkpoint: str, out: Path) -> None:
    export(checkpoint, out)
    model = loaded(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_untied_embeddings_are_two_tensors_after_loading(tmp_path: Path, out: Path) -> None:
    config = tiny(tmp_path, experiment__model__tie_embeddings=False)
    export(saved(tmp_path, config), out)
    assert torch.equal(logits(loaded(out)), logits(model_of(config)))


def test_the_exported_model_generates(checkpoint: str, out: Path) -> None:
    export(checkpoint, out)
    text = loaded(out).generate(TOKENS[:1], max_new_tokens=3, do_sample=False, pad_token_id=256)
    assert text.shape == (1, TOKENS.shape[1] + 3)


def test_nothing_but_the_weights_is_stored(checkpoint: str, config: RunConfig, out: Path) -> None:
    export(checkpoint, out)
    with safe_open(out / WEIGHTS, framework="pt") as file:
        assert set(file.keys()) == {name for name, _ in model_of(config).named_parameters()}


def test_the_trained_type_is_the_default(checkpoint: str, out: Path) -> None:
    export(checkpoint, out)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_bfloat16_rounds_every_weight_to_the_nearest(
    checkpoint: str, config: RunConfig, out: Path
) -> None:
    export(checkpoint, out, "--dtype", "bfloat16")
    rounded = dict(loaded(out).named_parameters())
    for name, weight in model_of(config).named_parameters():
        assert torch.equal(rounded[name], weight.to(torch.bfloat16)), name


def test_bfloat16_says_how_much_the_logits_change(
    checkpoint: str, config: RunConfig, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(checkpoint, out, "--dtype", "bfloat16")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "probe batch" in line]
    exact, rounded = probe_logits(model_of(config)), probe_logits(loaded(out))
    assert line.endswith(f"bfloat16: {(rounded - exact).abs().max().item():.4g}")


def test_export_with_json_is_one_document(
    checkpoint: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(checkpoint, out, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["files"] == ["model.safetensors"]
    assert (document["dtype"], document["largest_logit_difference"]) == ("float32", None)


def test_float32_has_no_difference_to_tell(
    checkpoint: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(checkpoint, out)
    assert "probe batch" not in capsys.readouterr().out


def test_byte_tokens_are_said_to_have_no_tokenizer(
    checkpoint: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(checkpoint, out)
    assert "no tokenizer files: a token is a byte" in capsys.readouterr().out


def test_weights_above_a_limit_come_in_several_files(
    checkpoint: str, config: RunConfig, out: Path
) -> None:
    export(checkpoint, out)
    (out / WEIGHTS).unlink()
    filesystem, path = open_store(checkpoint)
    marker = read_marker(filesystem.cat_file(f"{path}/{MARKER}"), uri=checkpoint)
    stored = StoredTensors(filesystem, path, marker=marker, uri=checkpoint)
    files = write_safetensors(
        stored, out, part="model", dtype=torch.float32, file_bytes=100_000, progress=lambda _: None
    )
    assert len(files) > 1
    assert (out / INDEX).exists()
    assert torch.equal(logits(loaded(out)), logits(model_of(config)))


def test_a_flipped_bit_stops_the_export_and_leaves_nothing(
    checkpoint: str, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = Path(checkpoint) / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    assert export(checkpoint, out) == 1
    assert "is damaged in block 0" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-0123"]


WITHOUT_ROOM = """
import resource, sys
from kettle.cli.app import run
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(run(["checkpoints", "export", *sys.argv[1:]]))
"""


def test_without_room_for_the_weights_nothing_is_left(
    checkpoint: str, tmp_path: Path, out: Path
) -> None:
    arguments = [sys.executable, "-c", WITHOUT_ROOM, checkpoint, "--out", str(out)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, f"can't export {checkpoint} to {out}" in done.stderr) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-0123"]


def test_a_folder_that_holds_something_is_refused(
    checkpoint: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out.mkdir()
    (out / "precious").touch()
    assert export(checkpoint, out) == 2
    assert f"{out} is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_an_empty_folder_is_taken(checkpoint: str, out: Path) -> None:
    out.mkdir()
    assert export(checkpoint, out) == 0


def test_folders_above_are_made(checkpoint: str, out: Path) -> None:
    assert export(checkpoint, out / "below" / "below") == 0


def test_a_place_that_can_not_be_a_folder_is_wrong_usage(
    checkpoint: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out.touch()
    assert export(checkpoint, out / "below") == 2
    assert f"can't make a folder in {out}" in capsys.readouterr().err


def test_a_marker_that_describes_another_model_is_refused(
    tmp_path: Path, config: RunConfig, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wider = tiny(tmp_path, experiment__model__intermediate_size=88)
    folder = tmp_path / "tiny-0123" / "step-00000004-g0001-a"
    committed(
        folder,
        {"model": ModelPart(model_of(config)).state_dict()},
        experiment=wider.experiment.model_dump(mode="json"),
    )
    assert export(str(folder), out) == 1
    assert "holds another model than its marker says" in capsys.readouterr().err


def test_a_marker_without_a_model_is_refused(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny-0123" / "step-00000004-g0001-a"
    committed(folder, {"model": {"w": torch.zeros(1)}}, experiment={})
    assert export(str(folder), out) == 1
    assert "experiment.model can't be understood" in capsys.readouterr().err


def test_everyone_who_may_read_the_config_may_read_the_weights(checkpoint: str, out: Path) -> None:
    export(checkpoint, out)
    assert (out / WEIGHTS).stat().st_mode == (out / "config.json").stat().st_mode


MEASURED = """
import sys
from pathlib import Path
import kettle.train.export
from kettle.cli.app import run
def of(what):
    return int(Path("/proc/self/status").read_text().split(what)[1].split()[0]) * 1024
before = of("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of the imports, is forgotten
assert run(["checkpoints", "export", *sys.argv[1:]]) == 0
print(of("VmHWM:") - before, file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_holds_the_model_once_and_no_optimizer(
    tmp_path: Path, out: Path, dtype: str
) -> None:
    config = tiny(
        tmp_path,
        experiment__model__hidden_size=512,
        experiment__model__intermediate_size=2048,
        experiment__model__layers=8,
    )
    checkpoint = saved(tmp_path, config)
    model_bytes = sum(p.numel() * 4 for p in model_of(config).parameters())
    arguments = [checkpoint, "--out", str(out), "--dtype", dtype]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, check=True
    )
    state_bytes = 3 * model_bytes
    assert int(done.stderr.split()[-1]) <= model_bytes + 0.25 * state_bytes
