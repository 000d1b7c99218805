"""Tiny models and their tokenizer: real architectures with random weights, for tests that end in seconds."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")
CHARACTERS = "\n" + "".join(sorted(string.printable[:95]))
VOCABULARY = 3 + len(ROLES) + len(CHARACTERS)  # 103

FAMILIES = ("llama", "qwen3", "gemma3", "mistral", "lfm2")

PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

TOOL_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n' -}}{%- endif -%}
{{- '<tools>\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif not (tools and loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def tiny_tokenizer(*, tools: bool = False) -> PreTrainedTokenizerFast:
    """One token a character, one a role, and `<|im_start|>` and `<|im_end|>` (the end of a turn) as in ChatML.

    A role's name is one token wherever it stands, so a reply sampled as `u`, `s`, `e`, `r` reads back as other ids:
    re-tokenising is not harmless here either. Characters outside printable ASCII read as `?`. With `tools` the chat
    template states tools as JSON in `<tools>` and calls in `<tool_call>`, in the manner of Hermes.
    """
    words = (PAD, START, END, *ROLES, *CHARACTERS)
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(role, special=False, normalized=False) for role in ROLES])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.chat_template = TOOL_TEMPLATE if tools else PLAIN_TEMPLATE
    return fast


def tiny_model(
    family: str = "llama",
    *,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    hidden: int = 64,
    layers: int = 2,
    window: int = 6,
) -> Any:
    """A random float32 causal language model in evaluation mode; the same seed gives the same weights.

    `hidden` is a multiple of 64: heads are 32 wide, two or more share one key. Weights have standard deviation
    1 / sqrt(hidden), so logits spread by about 1 and a wrong mask shows. `window` is the sliding window, in tokens, of
    gemma3 (every other layer) and mistral (every layer); lfm2 begins with a convolution, which takes no tree mask.
    """
    if family not in FAMILIES or hidden % 64:
        raise ValueError(
            f"a tiny model is one of {FAMILIES} with a width that is a multiple of 64 (heads of 32, two for each key), "
            f"but {family!r} with {hidden} was asked for"
        )
    config = _config(family, hidden=hidden, layers=layers, window=window, vocabulary=vocabulary)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def save_tiny(folder: str | Path, family: str = "llama", *, tools: bool = False, **sizes: Any) -> Path:
    """Write a tiny model (`sizes` as in `tiny_model`) and its tokenizer in Hugging Face form; gives the folder."""
    tiny_model(family, **sizes).save_pretrained(folder)
    tiny_tokenizer(tools=tools).save_pretrained(folder)
    return Path(folder)


def _config(family: str, *, hidden: int, layers: int, window: int, vocabulary: int) -> Any:
    special: dict[str, Any] = {}
    if family == "gemma3":
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
        special = {"sliding_window": window, "layer_types": kinds, "query_pre_attn_scalar": 32}
    if family == "mistral":
        special = {"sliding_window": window}
    if family == "lfm2":
        kinds = ["full_attention" if layer % 2 else "conv" for layer in range(layers)]
        special = {"layer_types": kinds, "block_auto_adjust_ff_dim": False}
    if family != "lfm2":
        special["head_dim"] = 32
    return AutoConfig.for_model(
        "gemma3_text" if family == "gemma3" else family,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=4096,
        initializer_range=hidden**-0.5,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        **special,
    )
