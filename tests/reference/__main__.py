"""Renew docs/configuration.md: `make docs`."""

from tests.reference.page import PAGE, renewed

if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
