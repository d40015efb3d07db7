"""`banyan soak`: the real engine under load, with a model that proves every byte it reads."""
