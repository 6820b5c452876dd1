"""The author's kit: proves of a backend what it declares. `jackfield check`, and a pytest plugin.

A check exercises one capability against a reference, with cases from the smallest up, and has a
verdict. What a backend does not declare must be refused. Importable without torch.
"""

from jackfield.testing.checks import Check, NotTriedError, Verdict, WrongError

__all__ = ["Check", "NotTriedError", "Verdict", "WrongError"]
