"""What all tests share: the option that writes the support table."""

from pathlib import Path

from support_table import SupportTable


def pytest_addoption(parser):
    parser.addoption("--support-table", metavar="FILE", help="write what the parity tests found into this Markdown file")


def pytest_configure(config):
    path = config.getoption("--support-table")
    if path:
        config.pluginmanager.register(SupportTable(Path(path)))
