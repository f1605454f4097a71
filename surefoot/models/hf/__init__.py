"""Directories of `transformers`: read into a `Transformer`, written from one, without importing `transformers`."""

from surefoot.models.hf.directory import export_directory as export_directory
from surefoot.models.hf.directory import import_directory as import_directory
from surefoot.models.hf.directory import load_model_dir as load_model_dir
from surefoot.models.hf.directory import save_model as save_model
from surefoot.models.hf.families import FAMILIES as FAMILIES
from surefoot.models.hf.families import Family as Family
from surefoot.models.hf.families import family_for as family_for
from surefoot.models.hf.io import export_model as export_model
from surefoot.models.hf.io import import_model as import_model
from surefoot.models.hf.io import read_config as read_config
