"""What all tests share: their options on the command line."""

from pathlib import Path

from support_table import SupportTable


def pytest_addoption(parser):
    parser.addoption("--support-table", metavar="FILE", help="write what the parity tests found into this Markdown file")
    parser.addoption("--plan-seed", metavar="SEED", type=int, default=0, help="draws other plans in test_hybrid_plans.py")


def pytest_configure(config):
    path = config.getoption("--support-table")
    if path:
        config.pluginmanager.register(SupportTable(Path(path)))
