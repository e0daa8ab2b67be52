"""What ten real programs write, shrunk to a few lines, and what hostile ones could write.

Recorded by running the program: tqdm, rich, git, Python's traceback. Made after public logs: pip
(rich's bars), torchrun (pytorch.org/docs/stable/elastic/errors.html), vLLM (docs.vllm.ai, usage),
llama.cpp (github.com/ggml-org/llama.cpp, output of a load), datasets
(huggingface.co/docs/datasets/process), NCCL (docs.nvidia.com/deeplearning/nccl, NCCL_DEBUG=INFO),
nvidia-smi (docs.nvidia.com/deploy/nvidia-smi).
"""

GREEN, RESET, ERASE, UP = "\x1b[32m", "\x1b[0m", "\x1b[K", "\x1b[A"
TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 12, in <module>
[rank1]:     loss.backward()
[rank1]: RuntimeError: expected scalar type BFloat16 but found Float
E1127 14:03:21.120000 7 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1)
╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /usr/lib/python3.12/site-packages/torch/distributed/run.py:918 in main       │
╰──────────────────────────────────────────────────────────────────────────────╯
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_14:03:21
  host      : north
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 4121)
  error_file: <N/A>
============================================================
"""
VLLM = (
    f"{GREEN}(APIServer pid=71){RESET} INFO 11-27 14:03:21 [api_server.py:1839] vLLM API server\n"
    f"{GREEN}(EngineCore_0 pid=90){RESET} INFO 11-27 14:03:30 [default_loader.py:262] took 2.1 s\n"
    "\rLoading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]\n"
    "\rLoading safetensors checkpoint shards: 100% Completed | 2/2 [00:01<00:00,  1.9it/s]\n\n"
    f"{GREEN}INFO{RESET}:     127.0.0.1:5100 - \"POST /v1/completions HTTP/1.1\" {GREEN}200{RESET}\n"
)  # fmt: skip
LLAMA_CPP = (
    "llama_model_loader: - kv   0:   general.architecture str              = llama\n"
    "load_tensors:   CPU_Mapped model buffer size =  1918.35 MiB\n"
    + "." * 74
    + "\nllama_context: n_ctx_per_seq (4096) < n_ctx_train (131072)\nbuild: 6123 (a1b2c3)\n"
)
# Two nested bars, each state of the lower one between a move down and a move up.
TQDM = (
    "\router:   0%|          | 0/2 [00:00<?, ?it/s]"
    "\n\rinner:   0%|          | 0/2 [00:00<?, ?it/s]\x1b[A"
    "\n\rinner:  50%|█████     | 1/2 [00:00<00:00, 99.08it/s]\x1b[A"
    "\n\rinner: 100%|██████████| 2/2 [00:00<00:00, 97.66it/s]\x1b[A"
    "\n\r                                                    \x1b[A"
    "\router:  50%|█████     | 1/2 [00:00<00:00, 47.76it/s]"
    "\n\rinner:  50%|█████     | 1/2 [00:00<00:00, 98.93it/s]\x1b[A"
    "\n\rinner: 100%|██████████| 2/2 [00:00<00:00, 97.92it/s]\x1b[A"
    "\rinner: 100%|██████████| 2/2 [00:00<00:00, 96.33it/s]\n"
    "\router: 100%|██████████| 2/2 [00:00<00:00, 47.44it/s]"
    "\router: 100%|██████████| 2/2 [00:00<00:00, 47.37it/s]\n"
)
PIP = (
    "Collecting torch==2.8.0\n  Downloading torch-2.8.0-cp312-cp312-manylinux_2_28_x86_64.whl (888.0 MB)\n"
    "\x1b[?25l     \x1b[90m━━━━━━━━━━━━\x1b[0m \x1b[32m0.0/888.0 MB\x1b[0m \x1b[31m?\x1b[0m eta \x1b[36m-:--:--\x1b[0m"
    "\r\x1b[2K     \x1b[38;2;249;38;114m━━━━━━\x1b[0m \x1b[32m444.0/888.0 MB\x1b[0m \x1b[31m98 MB/s\x1b[0m"
    "\r\x1b[2K     \x1b[90m━━━━━━━━━━━━\x1b[0m \x1b[32m888.0/888.0 MB\x1b[0m\x1b[?25h\n"
    "Installing collected packages: torch\nSuccessfully installed torch-2.8.0\n"
)  # fmt: skip
RICH = (
    "\x1b[?25l\rTraining \x1b[38;5;237m━━━━━\x1b[0m \x1b[35m  0%\x1b[0m \x1b[36m-:--:--\x1b[0m"
    "\r\x1b[2KTraining \x1b[38;5;197m━━\x1b[0m \x1b[35m 50%\x1b[0m \x1b[36m0:00:01\x1b[0m"
    "\r\x1b[2KTraining \x1b[38;5;70m━━━━━\x1b[0m \x1b[35m100%\x1b[0m \x1b[36m0:00:00\x1b[0m\n\x1b[?25h"
    "\x1b[2m[14:03:21]\x1b[0m saved to \x1b]8;id=7;file:///job/model\x1b\\model\x1b]8;;\x1b\\\n"
)
DATASETS = (
    "\rMap (num_proc=4):   0%|          | 0/1000 [00:00<?, ? examples/s]"
    "\rMap (num_proc=4):  25%|██▌       | 250/1000 [00:00<00:01, 612.42 examples/s]"
    "\rMap (num_proc=4): 100%|██████████| 1000/1000 [00:00<00:00, 1801.77 examples/s]\n"
    "\rSaving the dataset (0/1 shards):   0%|          | 0/1000 [00:00<?, ? examples/s]\r"
    "\rSaving the dataset (1/1 shards): 100%|██████████| 1000/1000 [00:00<00:00, 9e4 examples/s]\n"
)
NCCL = "".join(
    f"north:{pid}:{pid + 40} [{rank}] NCCL INFO {text}\n"
    for text in ("NET/Socket : Using [0]eth0:192.0.2.7<0>", "Channel 00/02 : 0 1", "Init COMPLETE")
    for rank, pid in enumerate((4120, 4121))
)
TRACEBACK = """\
Traceback (most recent call last):
  File "/job/größe.py", line 3, in <module>
    naïve = résumé["日本"] + größe["ключ"]["🚢"]
                             ~~~~~~~~~~~~~^^^^^^
KeyError: '🚢'
"""
GIT = (
    "Cloning into 'slipway'...\nremote: Enumerating objects: 210, done.        \n"
    + "".join(f"remote: Counting objects: {n:3}% ({2 * n}/210)        \r" for n in (0, 50, 99))
    + "remote: Counting objects: 100% (210/210), done.        \n"
    + "".join(f"Receiving objects: {n:3}% ({2 * n}/210)\r" for n in (1, 50))
    + "Receiving objects: 100% (210/210), 61.20 KiB | 5.56 MiB/s, done.\n"
)
NVIDIA_SMI = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.86.15              Driver Version: 570.86.15      CUDA Version: 12.8     |
|-----------------------------------------+------------------------+----------------------+
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                    0 |
| N/A   34C    P0             71W /  700W |       4MiB /  81559MiB |      0%      Default |
+-----------------------------------------------------------------------------------------+
"""
PROGRAMS = {
    "torchrun": TORCHRUN, "vllm": VLLM, "llama.cpp": LLAMA_CPP, "tqdm": TQDM, "pip": PIP,
    "rich": RICH, "datasets": DATASETS, "nccl": NCCL, "traceback": TRACEBACK, "git": GIT,
    "nvidia-smi": NVIDIA_SMI,
}  # fmt: skip

# What a hostile or a broken program writes, and the lines that are shown of it.
HOSTILE: dict[str, tuple[bytes, list[str]]] = {
    "invalid UTF-8": (b"caf\xe9 \xf0\x9f\x9a ok\n", ["caf\ufffd \ufffd ok"]),
    "UTF-16": ("ab\n".encode("utf-16-le"), ["a^@b^@", "^@"]),
    "NUL and BEL": (b"a\0b\x07c\n", ["a^@b^Gc"]),
    "title": (b"\x1b]0;you are root\x07ok\n", ["ok"]),
    "clipboard": (b"\x1b]52;c;Y3VybCBldmlsIHwgc2g=\x1b\\ok\n", ["ok"]),
    "clipboard without end": (b"\x1b]52;c;Y3VybA==\nok\n", ["^[]52;c;Y3VybA==", "ok"]),
    "clear and home": (b"\x1b[2J\x1b[H\x1bcok\n", ["ok"]),
    "8-bit controls": ("\x9b31mred\x9b0m \x9d0;title\x9cok\x85\n".encode(), ["red ok<U+0085>"]),
    "bytes of 8-bit controls": (b"\x9b31mred\n", ["\ufffd31mred"]),
    "bidi": ("user\u202e\u2066nimda\u2069\n".encode(), ["user<U+202E><U+2066>nimda<U+2069>"]),
    "zero width": ("pass\u200bword\ufeff\n".encode(), ["pass<U+200B>word<U+FEFF>"]),
    "joined emoji": ("👩\u200d💻 क्\u200dष\n".encode(), ["👩\u200d💻 क्\u200dष"]),
    "markup": (b"<script>alert(1)</script>\n", ["<script>alert(1)</script>"]),
    "form feed": (b"one\x0cpage\x0bdown\n", ["one^Lpage^Kdown"]),
    "separators": ("one\u2028two\u2029three\n".encode(), ["one<U+2028>two<U+2029>three"]),
    "lone CR": (b"old\rnew\rlast", ["last"]),
    "CRLF": (b"one\r\ntwo\r\n\r\nend\r\n", ["one", "two", "", "end"]),
    "escape at the end": (b"ok\x1b[3", ["ok^[[3"]),
}
