"""Training data: files in, batches out.

`prepare` turns text, source code, JSONL or Parquet into token shards; `Dataset` opens them; `Loader.batch(position, count)` is a
pure function of (seed, position), so one integer is the whole state of a run's data, on any number of processes.
"""

from __future__ import annotations

from surefoot.data.chat import ChatTemplate as ChatTemplate
from surefoot.data.config import DataConfig as DataConfig
from surefoot.data.config import PrepareConfig as PrepareConfig
from surefoot.data.config import TokenizerConfig as TokenizerConfig
from surefoot.data.corpus import Batches as Batches
from surefoot.data.corpus import Corpus as Corpus
from surefoot.data.dataset import Dataset as Dataset
from surefoot.data.loader import Batch as Batch
from surefoot.data.loader import Loader as Loader
from surefoot.data.loader import Prefetcher as Prefetcher
from surefoot.data.prepare import Progress as Progress
from surefoot.data.prepare import prepare as prepare
from surefoot.data.tokenizer import SpecialTokens as SpecialTokens
