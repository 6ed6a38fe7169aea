"""Write a text of generated words, and a small language model with its tokenizer: text_folder and tiny_model.

python tiny_model.py gpt2
"""

import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, LlamaConfig, PreTrainedTokenizerFast

random.seed(0)
words = ["".join(random.choices("abcdefghij", k=5)) for _ in range(100)]
lines = [" ".join(random.choices(words, k=12)) for _ in range(400)]
Path("text_folder").mkdir()
Path("text_folder/train.txt").write_text("\n".join(lines) + "\n")
tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=["<unk>", "<eos>"]))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>").save_pretrained("tiny_model")
if sys.argv[1] == "gpt2":
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2)
else:
    config = LlamaConfig(
        vocab_size=128,
        max_position_embeddings=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
config.save_pretrained("tiny_model")
