"""Where a JSON text ends that comes in pieces, by JSON's own rules: marks within its strings are text."""

import regex

SPACES = r"[ \t\n\r]*"
SCALAR = r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)(?=[ \t\n\r,\]}])"
HEX = "[0-9a-fA-F]"
PAIR = rf"u[dD][89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}}"  # halves alone are no text
TEXT = rf'[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){HEX}{{4}}|{PAIR})|"'
LEXEMES = {
    name: regex.compile(pattern)
    for name, pattern in {
        "begin": SPACES + r"[\[{]",
        "value": SPACES + rf'(?:[\[{{"]|{SCALAR})',
        "value or ]": SPACES + rf'(?:[\[{{"\]]|{SCALAR})',
        "key": SPACES + '"',
        "key or }": SPACES + r'["}]',
        "colon": SPACES + ":",
        "]": SPACES + r"[,\]]",  # behind a value of a list
        "}": SPACES + "[,}]",
        "text": TEXT,
        "text of key": TEXT,
    }.items()
}
MOST_DEPTH = 128  # parsers of clients bound it, too


class JsonText:
    """Reads one object or list."""

    def __init__(self) -> None:
        self.ended = self.broken = False
        self._closers, self._next = "", "begin"

    @property
    def depth(self) -> int:
        return len(self._closers)

    def read(self, text: str, depth: int = 0) -> int:
        """How many of these characters surely go on with it: up to the end of the value at this depth (`ended`), to what is no
        JSON (`broken`), or to a lexeme that further text may change."""
        place, self.ended = 0, False
        while not self.ended:
            found = LEXEMES[self._next].match(text, place, partial=True)
            self.broken = found is None or self.depth > MOST_DEPTH
            if found is None or found.partial or self.broken:
                break
            place = found.end()
            self._follow(found[0])
            self.ended = self._next in ("]", "}", "end") and found[0][-1] in "]}" and self.depth <= depth
        return place

    def _follow(self, lexeme: str) -> None:
        state, last, behind = self._next, lexeme[-1], self._closers[-1:] or "end"
        if state.startswith("text"):
            if lexeme == '"':
                self._next = "colon" if state == "text of key" else behind
        elif last in "{[":
            self._closers += "}" if last == "{" else "]"
            self._next = "key or }" if last == "{" else "value or ]"
        elif last == '"':
            self._next = "text of key" if state.startswith("key") else "text"
        elif last in ":,":
            self._next = "key" if last == "," and behind == "}" else "value"
        else:
            self._closers = self._closers[:-1] if last in "}]" else self._closers
            self._next = self._closers[-1:] or "end"
