"""A server process with an extended model: concurrent clients, shared prefixes, clients that leave."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import isentrope as ise
from isentrope.utils.shipped import find_shipped_model

pytestmark = pytest.mark.slow
NEW, PAGES, DEADLINE_SECONDS = 8, 24, 600
MAX_GROWTH_BYTES = 64 << 20
TEXT = "".join(f"def f{i}(x, y):\n    return x * {i} + y\n\n\n" for i in range(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The shipped Llama, trained at 256 tokens, extended and saved with its tokenizer."""
    path, shipped = tmp_path_factory.mktemp("served") / "longer", find_shipped_model("llama")
    model = AutoModelForCausalLM.from_pretrained(shipped, dtype=torch.float32)
    ise.extend(model, "rerope:window=128+infoscale").save_pretrained(path)
    AutoTokenizer.from_pretrained(shipped).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts():
    """16 of mixed lengths, within the training length and up to four times as long; most begin alike."""
    lengths = [20, 900, 60, 400, 120, 700, 33, 1000, 100, 300, 80, 600, 45, 520, 64, 810]
    return [TEXT[:n] if i % 4 else TEXT[7 * i : 7 * i + n] for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def port(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = ["--cb-num-blocks", str(PAGES), "--cb-max-batch-tokens", "512"]
    command = [sys.executable, "-m", "isentrope.run", "transformers", "serve", str(folder), "--continuous-batching"]
    command += [*sizes, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    process = subprocess.Popen(command)
    try:
        _wait_until_ready(process, port)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(process, port):
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.5)
    raise AssertionError(f"the server is not ready: exit status {process.poll()}")


@contextmanager
def _post(port, folder, prompt, **options):
    """Post a completion; the client leaves at the end of the block, whatever it has read."""
    body = {"model": str(folder), "prompt": prompt, "max_tokens": NEW, "temperature": 0.0} | options
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response


def _complete(port, folder, prompt):
    with _post(port, folder, prompt) as response:
        reply = response.read()
        assert response.status == 200, reply
        return json.loads(reply)["choices"][0]["text"]


def _generate(model, tokenizer, prompt):
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_server_and_sixteen_clients(folder, prompts, port):
    port, pid = port
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = ise.load(folder)
    expected = [_generate(model, tokenizer, prompt) for prompt in prompts]
    plain = AutoModelForCausalLM.from_pretrained(find_shipped_model("llama"), dtype=torch.float32)
    changed = [_generate(plain, tokenizer, prompt) != text for prompt, text in zip(prompts, expected, strict=True)]
    assert sum(changed) >= 3  # the recipe shows in replies

    memory = []
    for _ in range(3):
        with ThreadPoolExecutor(len(prompts)) as clients:
            replies = list(clients.map(lambda prompt: _complete(port, folder, prompt), prompts))
        assert replies == expected
        memory.append(psutil.Process(pid).memory_info().rss)
    assert memory[2] - memory[1] < MAX_GROWTH_BYTES

    # clients that leave: together they would fill the cache several times
    for _ in range(PAGES):
        with _post(port, folder, TEXT[:1000], stream=True, max_tokens=3000) as response:
            assert response.readline()
    assert [_complete(port, folder, prompt) for prompt in prompts[:4]] == expected[:4]
    assert psutil.Process(pid).memory_info().rss - memory[2] < MAX_GROWTH_BYTES
