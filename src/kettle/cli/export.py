"""`kettle checkpoints export`: a model for everything that reads Hugging Face folders."""

# ruff: noqa: PLC0415 - torch takes seconds to import, and only this command's body needs it

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from kettle.cli.config import AsJson
from kettle.cli.target import CheckpointName, find_checkpoint
from kettle.errors import CheckpointError, KettleError, UsageError


def export(
    checkpoint: CheckpointName,
    *,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="A folder that doesn't exist yet, or is empty.")
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="float32: the bits that were trained. bfloat16: rounded, half the size."),
    ] = "float32",
    as_json: AsJson = False,
) -> None:
    """Write the model as a Hugging Face folder: config.json and safetensors.

    `AutoModelForCausalLM.from_pretrained` loads it. Every byte is verified while it is read; the
    optimizer's state is not read at all. With bfloat16, says how much the logits of a fixed batch
    change.

    Example: kettle checkpoints export out/checkpoints/tiny-01234567/step-00000060-g0001-a --out m
    """
    from kettle.cli.listing import size_words, verdict_words
    from kettle.cli.progress import transfer
    from kettle.cli.render import say, show_json

    run, seen = find_checkpoint(checkpoint)
    marker = seen.marker
    if marker is None:
        raise UsageError(f"{seen.uri} can't be exported; it is {verdict_words(seen)}")
    if seen.verdict != "committed":
        say(f"warning: {seen.name} is {verdict_words(seen)}")

    from kettle.train.export import export_model, refuse_taken

    refuse_taken(out)
    try:
        with transfer("exporting", size_bytes=_model_bytes(marker.size_bytes)) as progress:
            written = export_model(
                run.filesystem,
                f"{run.prefix}/{seen.name}",
                marker=marker,
                uri=seen.uri,
                out=out,
                dtype=dtype,
                progress=progress,
            )
    except KettleError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"can't export {seen.uri} to {out}: {error}; nothing was left there"
        ) from error
    if as_json:
        document = {"checkpoint_uri": seen.uri, "run_id": marker.run_id, "step": seen.step}
        show_json(document | {"out": str(out), "dtype": dtype} | asdict(written))
        return
    typer.echo(
        f"wrote step {seen.step} of {marker.run_id} to {out}: {written.parameters} parameters as "
        f"{dtype}, {size_words(written.size_bytes)} in {len(written.files)} file"
        f"{'' if len(written.files) == 1 else 's'}"
    )
    if written.largest_logit_difference is not None:
        typer.echo(
            "largest difference of a logit on the probe batch, float32 to bfloat16: "
            f"{written.largest_logit_difference:.4g}"
        )
    if marker.experiment.get("data", {}).get("tokenizer") == "bytes":
        typer.echo("no tokenizer files: a token is a byte, and token 256 stands between documents")


def _model_bytes(state_bytes: int) -> int:
    """About a third: the rest are two moments of each parameter."""
    return state_bytes // 3
