"""The models that are measured, as run files would say them."""

from pathlib import Path

from kettle.config import RunConfig, load

EXAMPLE = Path(__file__).parents[1] / "examples" / "stdlib.toml"

_SHAPES: dict[str, dict[str, int]] = {
    "example": {},
    "2M": {"hidden_size": 192, "intermediate_size": 512, "layers": 5, "heads": 6, "kv_heads": 3},
    "20M": {"hidden_size": 448, "intermediate_size": 1408, "layers": 8, "heads": 8, "kv_heads": 4},
}


def case(
    model: str,
    *,
    root: Path,
    accumulation: int = 2,
    reduction: str = "canonical",
    exchange: str = "auto",
) -> RunConfig:
    """The example's run file with another model, so long that no step is its last."""
    overrides = [
        f"checkpoint.root={root}",
        "checkpoint.every=1000000",
        "experiment.total_steps=100000",
        f"experiment.accumulation={accumulation}",
        f"experiment.reduction={reduction}",
        f"runtime.exchange={exchange}",
    ]
    overrides += [f"experiment.model.{key}={value}" for key, value in _SHAPES[model].items()]
    return load(EXAMPLE, overrides)
