"""Tokenizers whose chat templates have the manners of four families, written here, for tests of the chat gateway.

qwen3    ChatML; tools in the system message, calls as `<tool_call>`; no reasoning before the last question
llama3   headers; tools in the first question, one call a turn, as a bare JSON object with `parameters`
gemma    roles alternate or it raises; no system role: its text opens the first question; no tools
mistral  `[INST]`; tools before the last question, calls as a list after `[TOOL_CALLS]`; ids of nine characters
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from whippletree.models.tiny import CHARACTERS

# each is one token wherever it stands, so that a reply spelled letter by letter reads back as other ids
WORDS = ("user", "assistant", "the", "name", "arguments", '": "', "  ", "\n\n", "}}")
SPECIAL = {  # the first ends a turn
    "qwen3": ("<|im_end|>", "<|im_start|>"),
    "llama3": ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    "gemma": ("<end_of_turn>", "<bos>", "<start_of_turn>"),
    "mistral": (
        *("</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
}
MARKS = {"qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>")}  # one token each, but text

QWEN3 = """\
{%- set first = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' + (first + '\\n\\n' if first else '') + '# Tools\\n\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nCall one so:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' -}}
{%- elif first -%}{{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' -}}{%- endif -%}
{%- set asked = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set asked.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif m.role == 'assistant' -%}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set thought = m.reasoning_content or '' -%}
{%- if not thought and '</think>' in m.content -%}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1] -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > asked.last and thought -%}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- said -}}
{%- for call in m.tool_calls or [] -%}
{{- ('\\n' if said or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif not (loop.first and m.role == 'system') -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- set shown = namespace(tools=not tools) -%}
{%- for m in messages -%}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' -}}
{%- if m.role == 'user' and not shown.tools -%}
{%- set shown.tools = true -%}
{{- 'Answer with a call where one helps, as {"name": NAME, "parameters": OBJECT}.\\n\\n' -}}
{%- for tool in tools -%}{{- tool | tojson(indent=4) + '\\n\\n' -}}{%- endfor -%}
{%- endif -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call a turn') -}}{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' -}}
{%- else -%}{{- m.content | trim -}}{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

GEMMA = """\
{{- '<bos>' -}}
{%- set first = messages[0].role == 'system' -%}
{%- for m in (messages[1:] if first else messages) -%}
{%- if m.role != ('assistant' if loop.index0 % 2 else 'user') -%}
{{- raise_exception('roles must alternate') -}}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' -}}
{%- if first and loop.first -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- m.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""

MISTRAL = """\
{{- '<s>' -}}
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if first else messages -%}
{%- set seen = namespace(turns=0) -%}
{%- for m in rest -%}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (seen.turns % 2 == 0) -%}
{{- raise_exception('user and assistant must alternate') -}}
{%- endif -%}
{%- set seen.turns = seen.turns + 1 -%}
{%- endif -%}
{%- if m.role == 'user' -%}
{%- if tools and m == (rest | selectattr('role', 'equalto', 'user') | list)[-1] -%}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST] ' + (first if loop.first else '') + m.content + '[/INST]' -}}
{%- elif m.tool_calls -%}
{{- '[TOOL_CALLS] [' -}}
{%- for call in m.tool_calls -%}
{%- if call.id | length != 9 -%}{{- raise_exception('ids of calls have nine characters') -}}{%- endif -%}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') -}}
{%- endfor -%}
{{- ']</s>' -}}
{%- elif m.role == 'assistant' -%}{{- ' ' + m.content | trim + '</s>' -}}
{%- elif m.role == 'tool' -%}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- else -%}{{- raise_exception('only user, assistant and tool may follow') -}}
{%- endif -%}
{%- endfor -%}"""

TEMPLATES = {"qwen3": QWEN3, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}


def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, a mark of the family or one of WORDS; the rest reads as `?`.

    Raises:
        ValueError: there is no such family.
    """
    if family not in TEMPLATES:
        raise ValueError(f"a family is one of {sorted(TEMPLATES)}, but {family!r} was asked for")
    end, *more = SPECIAL[family]
    words = dict.fromkeys((end, *more, *MARKS.get(family, ()), *WORDS, *CHARACTERS))
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in (*MARKS.get(family, ()), *WORDS)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, extra_special_tokens=more, clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATES[family]
    return fast
