"""Finding the turns of the assistant in the text of a conversation."""

import re
from collections.abc import Sequence


def any_of(names: Sequence[str]) -> re.Pattern[str]:
    """A pattern that matches the longest of some names; without names, nothing."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def end_of_turn(text: str, tokens: re.Pattern[str]) -> int:
    """The end of a text, without blanks after a token at its end."""
    trimmed_text = text.rstrip()
    ends = [match.end() for match in tokens.finditer(trimmed_text)]
    return len(trimmed_text if ends and ends[-1] == len(trimmed_text) else text)


def turns_after_prompts(text: str, prompt: str, tokens: re.Pattern[str]) -> list[tuple[int, int]]:
    """First character and end of each of the assistant's turns, in a text in which all begin with
    the same prompt.

    A turn ends with the token that ends the text, or before the first token of prompts. Adjacent
    turns are one, such as a chain of thought and its answer.
    """
    names = tokens.findall(text)
    start = tokens.match(prompt)
    if not names or not start:
        return []
    end = rf"(?={re.escape(start[0])})|{re.escape(names[-1])}|\Z"
    turns: list[tuple[int, int]] = []
    for match in re.finditer(rf"{re.escape(prompt)}(.*?(?:{end}))", text, re.DOTALL):
        first = match.start(1)
        after = first + end_of_turn(match[1], tokens)
        if turns and not text[turns[-1][1] : match.start()].strip():
            first = turns.pop()[0]
        turns.append((first, after))
    return turns
