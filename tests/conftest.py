"""What all tests share: their options on the command line."""

from pathlib import Path

from load_table import LoadTable
from support_table import SupportTable


def pytest_addoption(parser):
    parser.addoption("--support-table", metavar="FILE", help="write what the parity tests found into this Markdown file")
    parser.addoption("--load-table", metavar="FILE", help="write which plan loads what which plan saved into this Markdown file")
    parser.addoption("--plan-seed", metavar="SEED", type=int, default=0, help="draws other plans in test_hybrid_plans.py")


def pytest_configure(config):
    for option, table in (("--support-table", SupportTable), ("--load-table", LoadTable)):
        path = config.getoption(option)
        if path:
            config.pluginmanager.register(table(Path(path)))
