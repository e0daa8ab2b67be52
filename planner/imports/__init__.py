"""Draft a plan request from the command line or configuration file of another tool.

- ``paste``      the entry point: which tool a text is for, and its reader
- ``draft``      the result, and the collection of what was understood and what was not
- ``shell``      shell text as words, without running anything; options of a tool's table
- ``documents``  YAML and JSON within limits of depth, size and aliases
- ``containers`` the command in a Docker Compose file or in Kubernetes objects
- ``models``     a tool's name of a model as one of the catalog
- ``servers``    vLLM, SGLang, llama.cpp and TensorRT-LLM
- ``local_servers``  Ollama and MLX LM
- ``load_tests`` load tests of vLLM, SGLang and AIPerf, and vLLM's batches of a file
- ``compression``  llama-quantize, AutoRound and the recipes of LLM Compressor
- ``serving``    what their options share: formats, devices, offloading, speculation
- ``programs``   which trainer a launcher or Python starts, by its script and its arguments
- ``trainers``   launchers, Hugging Face trainers and Megatron-LM, by their command lines
- ``trainer_scripts``  ms-swift, nanoGPT and MLX LM's trainer, by their command lines
- ``on_policy`` completions of GRPO by TRL's names; ``verl`` verl's GRPO, by Hydra's overrides
- ``torchtitan`` its files, command lines and Python modules
- ``python_text`` scripts of Unsloth and TRL, by their syntax
- ``training_files``  Axolotl, LLaMA-Factory, TRL, DeepSpeed and Accelerate, by their files
- ``training``   what trainers share: batch, precision, sharding, adapters

The options of each tool are in ``planner/catalog/data/tool_options``.
"""

from planner.imports.draft import Import, Item, became, import_table
from planner.imports.paste import read_paste

__all__ = ["Import", "Item", "became", "import_table", "read_paste"]
