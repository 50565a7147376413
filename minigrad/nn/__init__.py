"""Layers and models. Reading order: module, layers, cache, attention, moe, generate, summary, transformer,
encoder_decoder."""

from minigrad.nn.attention import MultiheadAttention
from minigrad.nn.cache import KVCache
from minigrad.nn.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from minigrad.nn.generate import Interrupted, Sampler, beam_search
from minigrad.nn.layers import GELU, MLP, Dropout, Embedding, LayerNorm, Linear, RMSNorm, SwiGLU
from minigrad.nn.module import Module, ModuleList, Parameter, Sequential
from minigrad.nn.moe import MoE, balance_loss
from minigrad.nn.summary import Ledger, summarize
from minigrad.nn.transformer import Transformer, TransformerBlock, TransformerConfig

__all__ = ["GELU", "MLP", "Dropout", "Embedding", "EncoderDecoder", "EncoderDecoderConfig", "Interrupted", "KVCache",
           "LayerNorm", "Ledger", "Linear", "MoE", "Module", "ModuleList", "MultiheadAttention", "Parameter", "RMSNorm",
           "Sampler", "Sequential", "SwiGLU", "Transformer", "TransformerBlock", "TransformerConfig", "balance_loss",
           "beam_search", "summarize"]
