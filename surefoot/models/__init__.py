"""The reference: one `Transformer` from a `ModelSpec`, plain and on one device, against which everything else is proven."""

from surefoot.models.cache import Cache as Cache
from surefoot.models.generate import Sampling as Sampling
from surefoot.models.generate import generate as generate
from surefoot.models.init import initialise as initialise
from surefoot.models.init import learning_rate_multiplier as learning_rate_multiplier
from surefoot.models.loss import Loss as Loss
from surefoot.models.parameters import ParamDecl as ParamDecl
from surefoot.models.parameters import declarations as declarations
from surefoot.models.spec import ModelSpec as ModelSpec
from surefoot.models.transformer import Transformer as Transformer
