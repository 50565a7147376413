"""Layers and models. Reading order: module, layers, attention, transformer."""

from minigrad.nn.attention import MultiheadAttention
from minigrad.nn.layers import GELU, MLP, Dropout, Embedding, LayerNorm, Linear, RMSNorm, SwiGLU
from minigrad.nn.module import Module, ModuleList, Parameter, Sequential
from minigrad.nn.moe import MoE, balance_loss
from minigrad.nn.transformer import Transformer, TransformerBlock, TransformerConfig

__all__ = ["GELU", "MLP", "Dropout", "Embedding", "LayerNorm", "Linear", "MoE", "Module", "ModuleList",
           "MultiheadAttention", "Parameter", "RMSNorm", "Sequential", "SwiGLU", "Transformer", "TransformerBlock",
           "TransformerConfig", "balance_loss"]
