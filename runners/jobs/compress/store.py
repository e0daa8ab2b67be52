"""The layers that are done, one file each: complete or absent, so that a killed job goes on."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from runners.jobs.compress.results import Tensors

INDEX = "model.safetensors.index.json"
AROUND = "around"  # what stands around the layers: embeddings, last norm, output


class LayerStore:
    """A folder of finished layers; what other settings left there does not count."""

    def __init__(self, folder: Path, settings: str) -> None:
        """Take the folder as it is."""
        self.folder = folder
        self._settings = settings

    def write(self, key: str, tensors: Tensors, figures: Mapping[str, float]) -> None:
        """Put one layer's tensors and figures down; they stand once they are on the disk."""
        building = self.folder / f".{key}-building"
        metadata = {"settings": self._settings, "figures": json.dumps(dict(figures))}
        save_file(tensors, building, metadata={"format": "pt", **metadata})
        with building.open("rb") as file:
            os.fsync(file.fileno())
        building.rename(self._path(key))

    def read(self, key: str) -> tuple[Tensors, dict[str, float]] | None:
        """Return one layer's tensors and figures, None when it is not done with these settings."""
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
        """Move the files to a model folder under the names that loaders know, with their index."""
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
