"""Stop strings: end a completion with the very token that completes one of some strings.

Token in, token out: the text is only looked at, never tokenised again. For the stop string "\\n\\nQ":

    tokens   | A| 7|\\n\\n|Q:|...      decode(first 3) = "A7\\n\\n"     decode(first 4) = "A7\\n\\nQ:"  contains it
              keep 4 tokens, although the last one brings a ":" too

Completions that ran a few tokens further before anybody looked are cut all the same; log-probs are cut with them.
A string may begin in any token and a token may hold half a character, so text is compared, not ids. Only the new tokens
and a few before them are decoded, so that the work does not grow with the completion.

Where we differ from matching ids: the same string can be tokenised in several ways, and a model finds them all.
Cost: a few tokens are decoded at every look. Limits: a string that begins in the prompt is not found.
Copy along: nothing. Packages: numpy, and any tokenizer with decode(list of ids) -> str.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_CUT = np.iinfo(np.int64).max


class StopStrings:
    """For each sample, how many tokens to keep: up to the one with which its text first contains a string."""

    def __init__(self, tokenizer, strings: Sequence[str], samples: int):
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        self.cut = np.full(samples, NO_CUT)  # tokens to keep
        self.scanned = np.zeros(samples, dtype=np.int64)
        # a token may be as short as a byte, so a string of b bytes spans at most b tokens; 4 more end a split character
        self.overlap = max(len(s.encode()) for s in strings) + 4

    def is_cut(self, sample: int) -> bool:
        return bool(self.cut[sample] < NO_CUT)

    def scan(self, decoder, samples: np.ndarray) -> list[int]:
        """Samples, of these, that a string has ended; sets their cut."""
        rows = decoder.tokens_of(samples)
        found = []
        for s, row in zip(samples.tolist(), rows):
            length = int((row >= 0).sum())
            if not self.is_cut(s) and length > self.scanned[s]:
                start = max(0, int(self.scanned[s]) - self.overlap)
                if (size := self._ends_at(row[start:length].tolist())) is not None:
                    self.cut[s] = start + size
                self.scanned[s] = length
            if self.is_cut(s):
                found.append(s)
        return found

    def _ends_at(self, tokens: list[int]) -> int | None:
        def contains(size: int) -> bool:
            text = self.tokenizer.decode(tokens[:size])
            return any(string in text for string in self.strings)

        if not contains(len(tokens)):
            return None
        return next(size for size in range(1, len(tokens) + 1) if contains(size))


def demo() -> None:
    class Letters:
        def decode(self, ids):
            return "".join("ab\nQ"[i] for i in ids)

    stops = StopStrings(Letters(), ["\nQ"], 1)
    tokens = [0, 1, 2, 2, 3, 0]
    print(repr(Letters().decode(tokens)), "keeps", stops._ends_at(tokens), "tokens")


if __name__ == "__main__":
    demo()
