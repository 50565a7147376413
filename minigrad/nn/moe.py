class MoE: pass
def balance_loss(model): return 0.0
