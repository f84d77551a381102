"""The architecture of a decoder, and its Hugging Face `config.json`."""

from collections.abc import Mapping
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are changed for long contexts.

  `kind` is one of ROPE_FIELDS; the fields that it does not list are unused.
  """

  kind: str
  factor: float
  original_max_positions: int = 0  # tokens
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None  # None: derived from `factor`
  mscale: float | None = None
  mscale_all_dim: float | None = None
  truncate: bool = True


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder's architecture; hashable, so it can be a static argument."""

  vocab_size: int
  d_model: int
  d_mlp: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_positions: int = 2048  # tokens of prompt and response
  family: str = 'llama'
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-5
  tied_embeddings: bool = True  # the output head is the embedding
  attention_bias: bool = False  # of q, k and v
  output_bias: bool = False  # of the attention's output projection
  mlp_bias: bool = False
  init_std: float = 0.02

  def __post_init__(self):
    if self.family not in FAMILIES:
      raise ValueError(
        f'unknown model family {self.family!r}; one of {sorted(FAMILIES)}.'
      )
    for name in _SIZES:
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f'{name} is {value!r}; it must be an integer >= 1.')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads={self.num_heads} is not a multiple of'
        f' num_kv_heads={self.num_kv_heads}; every key/value head must serve'
        ' the same number of query heads.'
      )
    if self.head_dim % 2:
      raise ValueError(
        f'head_dim={self.head_dim} is odd; rotary positions turn pairs of'
        ' dimensions, so make it even.'
      )
    biases = self.attention_bias, self.output_bias, self.mlp_bias
    if self.family == 'qwen2' and biases != (True, False, False):
      raise ValueError(
        'qwen2 has biases on q, k and v and nowhere else; got attention_bias,'
        f' output_bias, mlp_bias = {biases}. Use (True, False, False).'
      )
    if self.family == 'llama' and self.attention_bias != self.output_bias:
      raise ValueError(
        'llama has attention biases on q, k, v and o or on none; got'
        f' attention_bias={self.attention_bias},'
        f' output_bias={self.output_bias}.'
      )


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
  """The config of a Hugging Face `config.json`.

  Reads the rotary settings of transformers 5 (`rope_parameters`) and of
  earlier versions (`rope_theta` and `rope_scaling`).

  Raises:
    ValueError: a family, activation, rotary scaling or attention pattern that
      the decoder does not compute exactly, or a missing key.
  """
  model_type = hf.get('model_type')
  if model_type not in FAMILIES:
    raise ValueError(
      f'model_type {model_type!r} is not supported; one of {sorted(FAMILIES)}.'
    )
  missing = [k for k in _HF_SIZES if k not in hf]
  if missing:
    raise ValueError(f'config.json lacks {missing}; is the file complete?')
  _refuse_unsupported(hf)
  theta, scaling = _rope_from_hf(hf)
  heads = hf['num_attention_heads']
  bias = {'llama': bool(hf.get('attention_bias', False)), 'qwen2': True}
  return ModelConfig(
    family=model_type,
    vocab_size=hf['vocab_size'],
    d_model=hf['hidden_size'],
    d_mlp=hf['intermediate_size'],
    num_layers=hf['num_hidden_layers'],
    num_heads=heads,
    num_kv_heads=hf.get('num_key_value_heads') or heads,
    head_dim=hf.get('head_dim') or _head_dim(hf['hidden_size'], heads),
    max_positions=hf.get(
      'max_position_embeddings', FAMILIES[model_type]['max_positions']
    ),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=float(hf.get('rms_norm_eps', 1e-6)),
    tied_embeddings=bool(hf.get('tie_word_embeddings', False)),
    attention_bias=bias[model_type],
    output_bias=bias[model_type] and model_type == 'llama',
    mlp_bias=model_type == 'llama' and bool(hf.get('mlp_bias', False)),
    init_std=float(hf.get('initializer_range', 0.02)),
  )


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """The `config.json` of a config, readable by transformers 4 and 5."""
  hf = {
    'architectures': [FAMILIES[config.family]['policy']],
    'model_type': config.family,
    'vocab_size': config.vocab_size,
    'hidden_size': config.d_model,
    'intermediate_size': config.d_mlp,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'max_position_embeddings': config.max_positions,
    'hidden_act': 'silu',
    'rms_norm_eps': config.norm_eps,
    'initializer_range': config.init_std,
    'tie_word_embeddings': config.tied_embeddings,
    'attention_dropout': 0.0,
    'rope_theta': config.rope_theta,
    'rope_scaling': _rope_to_hf(config.rope_scaling),
  }
  if config.family == 'llama':
    hf['attention_bias'] = config.attention_bias
    hf['mlp_bias'] = config.mlp_bias
  if config.family == 'qwen2':
    hf['use_sliding_window'] = False
  return hf


def _head_dim(hidden_size: int, heads: int) -> int:
  if hidden_size % heads:
    raise ValueError(
      f'hidden_size={hidden_size} is not a multiple of'
      f' num_attention_heads={heads} and config.json has no head_dim.'
    )
  return hidden_size // heads


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
  """Raises where the decoder would silently compute something else."""
  activation = hf.get('hidden_act', 'silu')
  if activation not in ('silu', 'swish'):
    raise ValueError(f'hidden_act {activation!r} is not supported; only silu.')
  layers = hf['num_hidden_layers']
  sliding = 'sliding_attention' in (hf.get('layer_types') or ())
  # Older Qwen2 files say it by numbers: layers from max_window_layers on.
  if hf.get('use_sliding_window') and hf.get('sliding_window'):
    sliding |= hf.get('max_window_layers', 28) < layers
  if sliding:
    raise ValueError(
      'sliding-window attention is in use (use_sliding_window with'
      f' max_window_layers < {layers}, or layer_types) and is not supported;'
      ' choose a model that attends to its whole context.'
    )
  if hf.get('quantization_config'):
    raise ValueError(
      'the checkpoint is quantised (quantization_config); use the float one.'
    )


def _rope_from_hf(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  rope = dict(hf.get('rope_scaling') or {})
  rope.update(hf.get('rope_parameters') or {})
  theta = float(rope.pop('rope_theta', hf.get('rope_theta') or 10000.0))
  kind = rope.pop('rope_type', rope.pop('type', 'default'))
  rope.pop('type', None)
  if rope.pop('partial_rotary_factor', 1.0) != 1.0:
    raise ValueError('partial_rotary_factor != 1 is not supported.')
  if kind == 'default':
    return theta, None
  if kind not in ROPE_FIELDS:
    raise ValueError(
      f'rope type {kind!r} is not supported; one of'
      f' {sorted(ROPE_FIELDS)} or default.'
    )
  if 'original_max_position_embeddings' in ROPE_FIELDS[kind]:
    rope.setdefault(
      'original_max_position_embeddings',
      hf.get('original_max_position_embeddings')
      or hf.get('max_position_embeddings', 2048),
    )
  known = {k: rope.pop(k) for k in ROPE_FIELDS[kind] if k in rope}
  if rope:
    raise ValueError(
      f'rope type {kind!r}: unknown settings {rope}; known are'
      f' {ROPE_FIELDS[kind]}.'
    )
  if known.get('factor') is None:
    raise ValueError(f"rope type {kind!r} needs 'factor'; got {known}.")
  # null in the file means the default of the field
  fields = {_OUR_NAME.get(k, k): v for k, v in known.items() if v is not None}
  return theta, RopeScaling(kind=kind, **fields)


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
  if scaling is None:
    return None
  fields = {
    k: getattr(scaling, _OUR_NAME.get(k, k)) for k in ROPE_FIELDS[scaling.kind]
  }
  return {
    'rope_type': scaling.kind,
    **{k: v for k, v in fields.items() if v is not None},
  }


# Per family: the class that transformers loads an actor or a critic with, and
# the context length where the file does not say one.
FAMILIES: dict[str, dict[str, Any]] = {
  'llama': dict(
    policy='LlamaForCausalLM',
    value='LlamaForSequenceClassification',
    max_positions=2048,
  ),
  'qwen2': dict(
    policy='Qwen2ForCausalLM',
    value='Qwen2ForSequenceClassification',
    max_positions=32768,
  ),
}

# The settings of each rotary scaling, by their names in config.json.
# 'dynamic' is left out on purpose: its frequencies depend on the length of the
# whole sequence, so cached decoding cannot equal the full forward pass.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
  'linear': ('factor',),
  'llama3': (
    'factor',
    'low_freq_factor',
    'high_freq_factor',
    'original_max_position_embeddings',
  ),
  'yarn': (
    'factor',
    'original_max_position_embeddings',
    'beta_fast',
    'beta_slow',
    'attention_factor',
    'mscale',
    'mscale_all_dim',
    'truncate',
  ),
}

_OUR_NAME = {'original_max_position_embeddings': 'original_max_positions'}
_SIZES = (
  'vocab_size',
  'd_model',
  'd_mlp',
  'num_layers',
  'num_heads',
  'num_kv_heads',
  'head_dim',
  'max_positions',
)
_HF_SIZES = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
)
