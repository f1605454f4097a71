"""Floor 6: the command line. A verb parses, makes a config and calls; it decides nothing.

Importing this imports no heavy library, so that ``surefoot --help`` answers at once.
"""

from __future__ import annotations

from surefoot.cli.app import main as main
