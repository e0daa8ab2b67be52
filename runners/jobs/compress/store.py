"""Store of finished layers, one atomically written file each, so that a killed job can resume."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from runners.jobs.compress.results import Tensors

INDEX = "model.safetensors.index.json"
AROUND = "around"  # tensors outside the layers: embeddings, final norm, output


class LayerStore:
    """A folder of finished layers; files written with other settings are ignored."""

    def __init__(self, folder: Path, settings: str) -> None:
        """Open an existing folder."""
        self.folder = folder
        self._settings = settings

    def write(self, key: str, tensors: Tensors, figures: Mapping[str, float]) -> None:
        """Write one layer's tensors and figures atomically, after fsync."""
        building = self.folder / f".{key}-building"
        metadata = {"settings": self._settings, "figures": json.dumps(dict(figures))}
        save_file(tensors, building, metadata={"format": "pt", **metadata})
        with building.open("rb") as file:
            os.fsync(file.fileno())
        building.rename(self._path(key))

    def read(self, key: str) -> tuple[Tensors, dict[str, float]] | None:
        """Return one layer's tensors and figures; None if not finished with these settings."""
        try:
            with safe_open(self._path(key), framework="pt") as file:
                metadata = file.metadata()
                if metadata.get("settings") != self._settings:
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (FileNotFoundError, SafetensorError):
            return None
        return tensors, json.loads(metadata["figures"])

    def assemble(self, target: Path, keys: list[str]) -> None:
        """Move the layers to a model folder as indexed safetensors shards; delete the store."""
        target.mkdir(parents=True, exist_ok=True)
        places: dict[str, str] = {}
        total = 0
        for number, key in enumerate(keys, start=1):
            name = f"model-{number:05d}-of-{len(keys):05d}.safetensors"
            with safe_open(self._path(key), framework="pt") as file:
                tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118 - no mapping
            save_file(tensors, target / name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, name)
            total += sum(each.numel() * each.element_size() for each in tensors.values())
            self._path(key).unlink()
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"
