"""`jackfield new`: a whole package of a new backend, written from a template."""

from jackfield.authoring.packages import Package, write_package

__all__ = ["Package", "write_package"]
