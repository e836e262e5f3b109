"""WGAN-GP in JAX: a penalty on the critic's gradient by its input."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers
from sklearn import datasets


def main(jit=False):
    critic = keras.Sequential(
        [keras.Input((64,)), layers.Dense(32, "tanh"), layers.Dense(1)]
    )
    generator = keras.Sequential(
        [keras.Input((8,)), layers.Dense(32, "relu"), layers.Dense(64)]
    )
    models = critic, generator
    adams = [keras.optimizers.Adam(1e-3) for _ in models]
    for adam, model in zip(adams, models, strict=True):
        adam.build(model.trainable_variables)

    def scores(weights, x):
        return critic.stateless_call(weights, [], x)[0][:, 0]

    def made_from(weights, noise):
        return generator.stateless_call(weights, [], noise)[0]

    def critic_loss(weights, real, made, part):
        between = real + part * (made - real)
        slope = jax.grad(lambda x: jnp.sum(scores(weights, x)))(between)
        norm = jnp.sqrt(jnp.sum(slope**2, -1))
        loss = jnp.mean(scores(weights, made)) - jnp.mean(scores(weights, real))
        return loss + 10.0 * jnp.mean((norm - 1.0) ** 2)

    def generator_loss(weights, fixed, noise):
        return -jnp.mean(scores(fixed, made_from(weights, noise)))

    @jax.jit
    def step(c, g, c_slots, g_slots, real, noise, part):
        made = made_from(g, noise)
        loss, grads = jax.value_and_grad(critic_loss)(c, real, made, part)
        c, c_slots = adams[0].stateless_apply(c_slots, grads, c)
        grads = jax.grad(generator_loss)(g, c, noise)
        g, g_slots = adams[1].stateless_apply(g_slots, grads, g)
        return loss, (c, g, c_slots, g_slots)

    used = [each.trainable_variables for each in models]
    used += [adam.variables for adam in adams]
    state = [[v.value for v in variables] for variables in used]
    rng, losses = keras.random.SeedGenerator(1), []
    digits = datasets.load_digits().data[:1024].astype("float32") / 16
    for batch in np.split(digits, 16) * 2:
        noise = keras.random.normal((64, 8), seed=rng)
        part = keras.random.uniform((64, 1), seed=rng)
        loss, state = step(*state, batch, noise, part)
        losses.append(float(loss))
    return losses
