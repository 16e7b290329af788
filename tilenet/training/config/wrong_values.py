"""Sentences about a run file that cannot be read, in place of jsonargparse's and YAML's words."""

import re

_WORDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "a text",
    "list[str]": "a list of texts",
    "list[int]": "a list of whole numbers",
    "list[float]": "a list of numbers",
    "list[int | str]": "a list of names and numbers",
    "tuple[str, ...]": "a list of texts",
    "dict[str, typing.Any]": "keys and their values",
}
_UNION = re.compile(
    r'key "([\w.]+)": Does not validate against any of the Union subtypes Subtypes: \[(.*?)\] '
    r"Errors: .*Given value: (.*)$"
)
_ONE = re.compile(r'key "([\w.]+)": Expected an? (.*?)\. Got value: (.*)$')
# Parts of others' words, and what is said for them; YAML's aliases and anchors begin alike.
_MISTAKES = {
    "Key must be a string, got": "keys are words; numbers have a decimal point, and lists brackets",
    "Unexpected config:": "a run file has a key and its value on each line, images: scene.tif",
    "codec can't decode": "a run file is a text in UTF-8; it may be another file",
    "Unable to load config": "a group has keys under it, or the path of a file with them",
    "while scanning an a": "a text that begins with * or & stands in quotes",
}


def in_our_words(message: str) -> str:
    """The rule and the value where a value is wrong; other messages with what they may mean."""
    if match := _UNION.search(message) or _ONE.search(message):
        key, kinds, value = match.groups()
        booleans = re.search(r"\b(True|False)\b", value) and "str" in kinds
        remedy = "; words such as yes, no and on stand in quotes" if booleans else ""
        return f'"{key}" takes {_listed(kinds)} ({key}: {value}); correct it{remedy}'
    message = message.split(" - Parser key")[0]
    meanings = [meaning for part, meaning in _MISTAKES.items() if part in message]
    return f"{meanings[0]} ({message.rstrip('.')})" if meanings else message


def _listed(kinds: str) -> str:
    """Kinds of values in words: `exact, epsilon or a whole number`."""
    words: list[str] = []
    for kind in re.findall(
        r"typing\.Literal\[.*?\]|<class '\w+'>|(?:list|tuple)\[.*?\]|dict\[.*?\]", kinds
    ):
        if kind.startswith("typing.Literal"):
            words += re.findall(r"'(.*?)'", kind)
        elif kind != "<class 'NoneType'>":
            words.append(_WORDS.get(kind, "values and a whole number or null for each"))
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
