# SPDX-License-Identifier: MIT
"""Description: transformers' own server answers over HTTP, with requests in slots."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

import torch
import transformers

from pyvmem.hf import continuous, serve

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = ["<pad>", "<end>", "<other>", *(f"w{number}" for number in range(60))]


def test_our_options_are_taken_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.split(["m", "--port", "1"]) == ({}, ["m", "--port", "1", "--continuous-batching"])
    options, theirs = serve.split(
        ["--continuous-batching", "--vmem-max-batch", "3", "m", "--vmem-page-size=4096"]
    )
    assert options == {"max_batch": 3, "page_size": 4096}
    assert theirs == ["--continuous-batching", "m"]
    with pytest.raises(SystemExit):
        serve.split(["--vmem-max-batch", "many"])
    assert "invalid int value" in capsys.readouterr().err


def test_a_bad_option_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--vmem-max-batch", "0", "m"]) == 2
    assert "max_batch is 0" in capsys.readouterr().err


def save_model(folder: Path) -> Any:
    """A model of random weights with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<other>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<other>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    return tokenizer, model


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


@pytest.mark.slow
@pytest.mark.needs_tensors
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # transformers' own
def test_the_server_answers_as_generate_does(tmp_path: Path) -> None:
    for package in ("fastapi", "uvicorn", "openai", "pydantic", "rich", "accelerate", "tokenizers"):
        pytest.importorskip(package, reason=f"transformers serve needs {package}")
    if ".".join(transformers.__version__.split(".")[:2]) not in continuous.CHECKED:
        pytest.skip(f"transformers {transformers.__version__}")
    tokenizer, model = save_model(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    command = [sys.executable, "-m", "pyvmem.hf.serve", str(tmp_path), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--vmem-max-batch", "3", "--vmem-page-size", "4096", "--vmem-backend", "host"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        for _ in range(1200):
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                ask(port, "/health")
                break
            except OSError:
                time.sleep(0.2)
        prompts = [" ".join(WORDS[3 + i : 8 + 3 * i]) for i in range(6)]

        def complete(prompt: str) -> str:
            body = {"model": str(tmp_path), "prompt": prompt, "max_tokens": 12, "temperature": 0}
            reply = ask(port, "/v1/completions", body)
            return str(reply["choices"][0]["text"])

        with ThreadPoolExecutor(len(prompts)) as clients:
            got = list(clients.map(complete, prompts))
        for prompt, answer in zip(prompts, got, strict=True):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                new = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
            assert answer.split() == tokenizer.decode(new, skip_special_tokens=True).split()
        assert "attention by sdpa" in log.read_text()  # ours, and not transformers' paged one
    except (AssertionError, urllib.error.HTTPError):
        print(log.read_text()[-4000:])
        raise
    finally:
        server.terminate()
        server.wait(60)
