"""A small sound recipe, written anew for each test, and what is said when it is spoilt."""

from pathlib import Path

import pytest

from gymloop.config.load import Loaded, load
from gymloop.errors import ConfigError

BASE = """\
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 4
  max_num_steps: 3
loss_fn:
  ratio_clip_min: 0.2
policy:
  model_name: some/model
  max_total_sequence_length: 128
  optimizer:
    kwargs: {lr: 1e-5, betas: [0.9, 0.95]}
  generation:
    max_new_tokens: 16
    temperature: 1.0
data:
  train: {environment: sums, num_tasks: 8}
env:
  environments:
    sums: {entrypoint: "my_gym.sums:Sums"}
"""


class Files:
    """Recipes in one folder; messages are given with the folder's name taken out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("base.yaml", BASE)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def load(self, name: str, *overrides: str, environ: dict[str, str] | None = None) -> Loaded:
        return load(self.folder / name, overrides, environ or {})

    def said(self, name: str, *overrides: str, environ: dict[str, str] | None = None) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            self.load(name, *overrides, environ=environ)
        lines = [line.strip() for line in str(caught.value).replace(f"{self.folder}/", "").splitlines()]
        return lines[1:] if len(lines) > 1 else lines


@pytest.fixture
def base() -> str:
    return BASE


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)
