"""Small programs of stock torch, each with one fault. `catalog` says what they do; `lockstep demo` shows them."""
