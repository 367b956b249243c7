r"""A model's chat template, rendered where it can do no harm: in a process that can be killed.

Idea. A chat template is a program that comes with a model folder, written in jinja. transformers runs it in jinja's
sandbox, so that it reaches neither files nor Python; but no sandbox keeps it from running forever or from eating memory:

    {% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}        ten thousand million turns
    {{ 'x' * 99999999999 }}      {{ 9 ** (9 ** (9 ** 9)) }}                                    one C call, deaf to Ctrl-C

So the text is made by transformers' own renderer in a worker (grading/killable.py) with a limit on its CPU time and
memory, and what comes back is text, or one line that says why not.

    problems' texts --> worker: transformers' render_jinja_template --> prompts as text --> tokenised here, as data

Where we differ from apply_chat_template: it renders in the caller's own process. Prompts are the same, token for token.
Cost: a second, once, to start the worker, and 20 microseconds a prompt. Models without a template start none.
Limits: POSIX. One user turn and the beginning of the answer; no tools, no system prompt but the template's own.
Copy along: grading/killable.py.
"""
from __future__ import annotations

import functools
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from grading.killable import CallFailed, Killable

BATCH, WALL_S = 256, 120.0                  # texts a call
CPU_S = 10.0                                # of one call; a common template takes 0.005 s, the imports before the first 1 s
MEMORY_BYTES = 2 << 30                      # beyond what the imports took
LONGEST = 10_000_000                        # characters of one prompt


def render_chats(texts: Sequence[str], tokenizer, names: Sequence[str], cpu_s: float = CPU_S) -> list[str]:
    """Each text as a user's turn in the tokenizer's chat template, with the beginning of the answer.

    ValueError (one line, with the text's name) where the template fails, takes too long or takes too much.
    """
    try:
        template = tokenizer.get_chat_template()
    except Exception as error:      # several templates and none called default, or no text at all
        raise ValueError(f"the tokenizer has no usable chat template ({str(error).splitlines()[0][:100]}); "
                         "mend chat_template in the model folder, or remove it") from None
    specials, chats = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}, []
    for start in range(0, len(texts), BATCH):
        part = list(texts[start : start + BATCH])
        try:
            found = _worker(os.getpid(), cpu_s)(template=template, texts=part, specials=specials)
        except CallFailed as error:
            found = [{"error": str(error)}]
        for name, outcome in zip(names[start:], found):
            if "error" in outcome:
                raise ValueError(f"the tokenizer's chat template fails on problem {name} ({outcome['error']}); "
                                 "mend chat_template in the model folder, or remove it")
            chats.append(outcome["text"])
    return chats


@functools.lru_cache(maxsize=1)
def _worker(process_id: int, cpu_s: float) -> Killable:
    """One a process: a fork must not share its parent's. It leaves when the process does."""
    return Killable(f"{Path(__file__).resolve()}:render", wall_s=WALL_S, cpu_s=cpu_s, quiet=True)


# ----------------------------------------------------------------------------------------------------------------------
# What runs in the worker
# ----------------------------------------------------------------------------------------------------------------------
def render(template: str, texts: list[str], specials: dict[str, str]) -> list[dict]:
    """{"text": ...} of each, or {"error": why not} for the first that fails."""
    from transformers.utils.chat_template_utils import render_jinja_template
    _limit_memory()
    outcomes = []
    for text in texts:
        try:
            chats = render_jinja_template(conversations=[[{"role": "user", "content": text}]], chat_template=template,
                                          add_generation_prompt=True, **specials)
            # transformers 5 gives (texts, masks), 4.50 and before the texts alone
            chat = (chats[0] if isinstance(chats, tuple) else chats)[0]
            if len(chat) > LONGEST:
                raise ValueError(f"it makes {len(chat)} characters of {len(text)}")
        except Exception as error:      # whatever a template raises, jinja's own errors and Python's alike
            reason = "".join(c if c.isprintable() else " " for c in str(error)[:100]) or "no reason given"
            return [*outcomes, {"error": f"{type(error).__name__}: {reason}"}]
        outcomes.append({"text": chat})
    return outcomes


@functools.lru_cache(maxsize=1)
def _limit_memory() -> None:
    try:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:      # no Linux: the CPU time alone is limited
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def demo() -> None:
    class Tokenizer:
        special_tokens_map = {"eos_token": "<|im_end|>"}

        def get_chat_template(self):
            return self.chat_template

    tokenizer = Tokenizer()
    for template in ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}",
                     "{{ open('/etc/passwd').read() }}", "{{ 'x' * 99999999999 }}",
                     "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"):
        tokenizer.chat_template = template
        print(template[:62].replace("\n", "\\n"))
        try:
            print("   ", repr(render_chats(["What is 2 + 2?"], tokenizer, ["one"], cpu_s=1.5)[0]))
        except ValueError as error:
            print("   ", str(error).partition("(")[2].rpartition(")")[0])
    _worker(os.getpid(), 1.5).close()


if __name__ == "__main__":
    demo()
