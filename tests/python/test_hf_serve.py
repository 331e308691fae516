# SPDX-License-Identifier: MIT
"""Transformers' own server answers over HTTP, with requests in slots."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

import torch
import transformers
from continuous_helpers import checked_versions

from pyvmem.hf import continuous, serve

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = ["<pad>", "<end>", "<other>", *(f"w{number}" for number in range(60))]
NEW = 12  # words per answer


def test_our_options_are_removed(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.split(["m", "--port", "1"]) == ({}, ["m", "--port", "1", "--continuous-batching"])
    options, theirs = serve.split(
        ["--continuous-batching", "--vmem-max-batch", "3", "m", "--vmem-page-size=4096"]
    )
    assert options == {"max_batch": 3, "page_size": 4096}
    assert theirs == ["--continuous-batching", "m"]
    with pytest.raises(SystemExit):
        serve.split(["--vmem-max-batch", "many"])
    assert "invalid int value" in capsys.readouterr().err


def test_a_bad_option_prints_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--vmem-max-batch", "0", "m"]) == 2
    assert "max_batch is 0" in capsys.readouterr().err


@pytest.mark.filterwarnings("default")  # transformers' own warnings
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--port", "8000"], "pyvmem.hf.serve: no MODEL: pass the folder"),
        (["/nowhere/at/all", "--port", "0"], "pyvmem.hf.serve: "),
    ],
)
def test_no_model_is_a_message(
    words: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("fastapi", "uvicorn", "openai", "pydantic", "rich", "accelerate"):
        pytest.importorskip(package, reason=f"transformers serve needs {package}: extra 'server'")
    monkeypatch.setattr(continuous, "install", lambda **options: None)
    monkeypatch.setattr(serve, "_refuse_with_400", lambda server: None)
    assert serve.main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(text)


@pytest.mark.filterwarnings("default")  # transformers' own warnings
def test_a_missing_package_prints_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = pytest.importorskip("transformers.cli.serve")
    monkeypatch.setattr(command, "is_serve_available", lambda: False)
    monkeypatch.setattr(continuous, "install", lambda **options: None)
    monkeypatch.setattr(serve, "_refuse_with_400", lambda server: None)
    assert serve.main(["m"]) == 2
    assert "pyvmem.hf.serve: Missing dependencies" in capsys.readouterr().err


def test_ctrl_c_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives before the first request, and the server shuts down cleanly."""
    click = pytest.importorskip("click")
    cli = pytest.importorskip("transformers.cli.transformers", reason="extra 'server'")

    def app(words: list[str], standalone_mode: bool) -> None:
        raise click.exceptions.Abort

    monkeypatch.setattr(continuous, "install", lambda **options: None)
    monkeypatch.setattr(serve, "_named", lambda *_: True)
    monkeypatch.setattr(serve, "_refuse_with_400", lambda server: None)
    monkeypatch.setattr(cli, "app", app)
    assert serve.main(["m"]) == 130


def save_model(folder: Path) -> Any:
    """Saves a model with random weights, and a tokenizer whose tokens are whole words."""
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


@dataclass
class Server:
    """A running server, and the model that it serves.

    Attributes:
        log: its output.
    """

    folder: Path
    port: int
    log: Path
    tokenizer: Any
    model: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        """Returns an ordinary OpenAI client, but without retries; the caller closes it."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def words(self, prompt: str) -> list[str]:
        """Returns the `NEW` words that `generate` produces for a prompt."""
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            new = self.model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        return str(self.tokenizer.decode(new, skip_special_tokens=True)).split()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs ``python -m pyvmem.hf.serve`` in its own process, on a free port of this machine."""
    for package in ("fastapi", "uvicorn", "openai", "pydantic", "rich", "accelerate", "tokenizers"):
        pytest.importorskip(package, reason=f"transformers serve needs {package}: extra 'server'")
    folder = tmp_path_factory.mktemp("serve")
    tokenizer, model = save_model(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = Server(folder, port, folder / "log", tokenizer, model)
    command = [sys.executable, "-m", "pyvmem.hf.serve", str(folder), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--vmem-max-batch", "3", "--vmem-page-size", "4096", "--vmem-backend", "host"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with one.log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        for _ in range(1200):
            if process.poll() is not None:
                pytest.fail(f"the server exited: {one.log.read_text()[-4000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{one.url}/health"):
                break
            time.sleep(0.2)
        yield one
        assert process.poll() is None, one.log.read_text()[-4000:]
    finally:
        process.terminate()
        process.wait(60)


def complete(server: Server, prompt: str) -> str:
    with server.client() as client:
        reply = client.completions.create(
            model=str(server.folder), prompt=prompt, max_tokens=NEW, temperature=0
        )
    return str(reply.choices[0].text)


def ask(server: Server, client: Any, prompt: str, tokens: int = NEW, **how: Any) -> Any:
    return client.chat.completions.create(
        model=str(server.folder),
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        **how,
    )


def chat(server: Server, prompt: str) -> str:
    with server.client() as client:
        reply = ask(server, client, prompt)
    assert reply.usage.prompt_tokens == len(prompt.split())
    return str(reply.choices[0].message.content)


def chat_streamed(server: Server, prompt: str) -> str:
    with server.client() as client, ask(server, client, prompt, stream=True) as chunks:
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert sum(map(bool, parts)) > 1, "the answer was not streamed"
    return "".join(parts)


def drives_the_server(test: Any) -> Any:
    """Adds the marks for a test that uses the server process."""
    for mark in (
        checked_versions,
        pytest.mark.slow,
        pytest.mark.needs_tensors,
        pytest.mark.timeout(600),
        pytest.mark.filterwarnings("default"),  # transformers' own warnings
    ):
        test = mark(test)
    return test


@drives_the_server
@pytest.mark.parametrize("call", [complete, chat, chat_streamed])
def test_four_concurrent_clients_match_generate(
    server: Server, call: Callable[[Server, str], str]
) -> None:
    """There are more clients than slots, so one must wait."""
    prompts = [" ".join(WORDS[3 + i : 8 + 3 * i]) for i in range(4)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        got = list(clients.map(lambda prompt: call(server, prompt), prompts))
    assert [answer.split() for answer in got] == [server.words(prompt) for prompt in prompts]
    # proves that our attention ran, not transformers' paged path
    assert "attention by sdpa" in server.log.read_text()


@drives_the_server
def test_a_client_that_disconnects_frees_its_slot(server: Server) -> None:
    prompt = " ".join(WORDS[3:9])
    for _ in range(4):  # more times than there are slots
        with server.client() as client, ask(server, client, prompt, 200, stream=True) as chunks:
            next(iter(chunks))
    assert chat(server, prompt).split() == server.words(prompt)


@drives_the_server
@pytest.mark.parametrize(("prompt", "tokens"), [("w1 " * 300, -100), ("", NEW)])
def test_an_invalid_request_does_not_stop_the_server(
    server: Server, prompt: str, tokens: int
) -> None:
    import openai

    with server.client() as client, pytest.raises(openai.BadRequestError):
        ask(server, client, prompt, tokens)
    assert chat(server, "w1 w2").split() == server.words("w1 w2"), "the server must keep running"


@drives_the_server
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_larger_than_a_slot_is_a_client_error(server: Server, stream: bool) -> None:
    import openai

    with (
        server.client() as client,
        pytest.raises(
            openai.BadRequestError, match=r"3 prompt tokens and 999 new .*max_seq_len 256"
        ),
    ):
        ask(server, client, "w1 w2 w3", 999, stream=stream)
    assert chat(server, "w1 w2").split() == server.words("w1 w2"), "the server must keep running"
