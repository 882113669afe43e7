"""Digits against photographs in a minute: a network, three ways to say how sure it is, and a page that shows them."""

from scalla.demo.experiment import Demo, Settings, run_demo
from scalla.demo.page import write_page

__all__ = ["Demo", "Settings", "run_demo", "write_page"]
