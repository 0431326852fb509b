//! Writes small checkpoints in the published formats and reads them back.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::*;
use crate::monolithic;

/// A directory that goes away with the test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("kv-checkpoint-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn config(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 96,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        latent: None,
        head_dim: 8,
        tie_word_embeddings: tied,
        ..ModelConfig::small()
    }
}

fn write_config(dir: &Path, tied: bool, more: serde_json::Value) {
    let mut file = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": tied, "eos_token_id": [94, 95], "torch_dtype": "bfloat16",
    });
    file.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    std::fs::write(dir.join("config.json"), file.to_string()).unwrap();
}

/// Every tensor of a model, with its published name and its shape.
fn tensors<'a>(config: &ModelConfig, weights: &'a Weights) -> BTreeMap<String, (Vec<usize>, &'a [f32])> {
    let (hidden, inner, vocab) = (config.hidden_size, config.intermediate_size, config.vocab_size);
    let (query, kv) = (config.query_dim(), config.key_dim());
    let mut all: BTreeMap<String, (Vec<usize>, &[f32])> = BTreeMap::new();
    all.insert("model.embed_tokens.weight".into(), (vec![vocab, hidden], &weights.embed));
    all.insert("model.norm.weight".into(), (vec![hidden], &weights.norm));
    if let Some(head) = &weights.head {
        all.insert("lm_head.weight".into(), (vec![vocab, hidden], head));
    }
    for (i, layer) in weights.layers.iter().enumerate() {
        for (name, shape, data) in [
            ("input_layernorm", vec![hidden], &layer.input_norm),
            ("self_attn.q_proj", vec![query, hidden], &layer.q),
            ("self_attn.k_proj", vec![kv, hidden], &layer.k),
            ("self_attn.v_proj", vec![kv, hidden], &layer.v),
            ("self_attn.o_proj", vec![hidden, query], &layer.o),
            ("post_attention_layernorm", vec![hidden], &layer.post_norm),
            ("mlp.gate_proj", vec![inner, hidden], &layer.gate),
            ("mlp.up_proj", vec![inner, hidden], &layer.up),
            ("mlp.down_proj", vec![hidden, inner], &layer.down),
        ] {
            all.insert(format!("model.layers.{i}.{name}.weight"), (shape, data));
        }
    }
    all
}

fn encode(data: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        // The tests' weights have seven mantissa bits at most: truncation is exact.
        Dtype::BF16 => data.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(),
        Dtype::F16 => data.iter().flat_map(|x| f32_to_f16(*x).to_le_bytes()).collect(),
        other => panic!("the tests write no {other:?}"),
    }
}

/// For numbers that are normal and exact in half precision.
fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x == 0.0 {
        return (bits >> 16) as u16;
    }
    let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
    assert!((1..31).contains(&exponent), "{x} is not normal in f16");
    (bits >> 16 & 0x8000) as u16 | (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16
}

/// The weights, rounded to values that bf16 and f16 both hold exactly.
fn rounded(mut weights: Weights) -> Weights {
    let round = |tensor: &mut Vec<f32>| {
        for x in tensor {
            *x = f32::from_bits(x.to_bits() & 0xffff_0000);
            if x.abs() < 1e-4 {
                *x = 0.0;
            }
        }
    };
    for layer in &mut weights.layers {
        let LayerWeights { input_norm, q, k, v, o, post_norm, gate, up, down } = layer;
        [input_norm, q, k, v, o, post_norm, gate, up, down].into_iter().for_each(round);
    }
    [&mut weights.embed, &mut weights.norm].into_iter().for_each(round);
    weights.head.iter_mut().for_each(round);
    weights
}

fn write_tensors(file: &Path, tensors: &BTreeMap<String, (Vec<usize>, &[f32])>, dtype: Dtype) {
    let bytes: Vec<_> =
        tensors.iter().map(|(name, (shape, data))| (name, shape.clone(), encode(data, dtype))).collect();
    let views =
        bytes.iter().map(|(name, shape, data)| (name, TensorView::new(dtype, shape.clone(), data).unwrap()));
    std::fs::write(file, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn a_checkpoint_in_any_float_type_gives_the_model_it_was_written_from() {
    for (dtype, tied) in [(Dtype::F32, false), (Dtype::F16, true), (Dtype::BF16, false)] {
        let dir = Dir::new(&format!("{dtype:?}"));
        let config = ModelConfig { eos_token_ids: vec![94, 95], ..config(tied) };
        let weights = rounded(Weights::random(&config, 5));
        write_config(&dir.0, tied, json!({}));
        write_tensors(&dir.0.join("model.safetensors"), &tensors(&config, &weights), dtype);
        let loaded = load_model(&dir.0).unwrap();
        assert_eq!(*loaded.config(), config);
        let prompt: Vec<u32> = (0..20).collect();
        assert_eq!(
            monolithic::generate(&loaded, &prompt, &[], 4).unwrap(),
            monolithic::generate(&Model::new(config, weights), &prompt, &[], 4).unwrap(),
            "{dtype:?}"
        );
    }
}

#[test]
fn shards_are_found_through_the_index() {
    let dir = Dir::new("shards");
    let config = config(false);
    let weights = Weights::random(&config, 6);
    write_config(&dir.0, false, json!({}));
    let all = tensors(&config, &weights);
    let (mut first, mut second, mut map) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for (i, (name, tensor)) in all.into_iter().enumerate() {
        let shards = [
            (&mut first, "model-00001-of-00002.safetensors"),
            (&mut second, "model-00002-of-00002.safetensors"),
        ];
        let [even, odd] = shards;
        let (shard, file) = if i % 2 == 0 { even } else { odd };
        map.insert(name.clone(), file);
        shard.insert(name, tensor);
    }
    write_tensors(&dir.0.join("model-00001-of-00002.safetensors"), &first, Dtype::F32);
    write_tensors(&dir.0.join("model-00002-of-00002.safetensors"), &second, Dtype::F32);
    let index = json!({ "metadata": {"total_size": 0}, "weight_map": map });
    std::fs::write(dir.0.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let loaded = load_model(&dir.0).unwrap();
    let prompt = [1, 2, 3];
    assert_eq!(
        monolithic::generate(&loaded, &prompt, &[], 3).unwrap(),
        monolithic::generate(&Model::new(config, weights), &prompt, &[], 3).unwrap()
    );
}

#[test]
fn rope_scaling_is_read_in_its_old_and_its_new_spelling() {
    let dir = Dir::new("rope");
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    write_config(&dir.0, false, json!({ "rope_scaling": scaling, "rope_theta": 500000.0 }));
    let old = read_config(&dir.0.join("config.json")).unwrap();
    let mut parameters = scaling;
    parameters["rope_theta"] = json!(500000.0);
    write_config(&dir.0, false, json!({ "rope_parameters": parameters, "rope_theta": null }));
    let new = read_config(&dir.0.join("config.json")).unwrap();
    assert_eq!(old, new);
    assert_eq!(old.rope_theta, 500_000.0);
    assert_eq!(old.rope_scaling.unwrap().factor, 8.0);

    write_config(&dir.0, false, json!({ "rope_scaling": { "type": "yarn", "factor": 4.0 } }));
    let error = read_config(&dir.0.join("config.json")).unwrap_err();
    assert_eq!(error.to_string(), "config.json: rope_scaling.rope_type is yarn; supported: default, llama3");
}

#[test]
fn a_checkpoint_that_does_not_fit_its_config_names_the_tensor() {
    let dir = Dir::new("misfit");
    let config = config(false);
    let weights = Weights::random(&config, 7);
    write_config(&dir.0, false, json!({ "intermediate_size": 32 }));
    let mut all = tensors(&config, &weights);
    write_tensors(&dir.0.join("model.safetensors"), &all, Dtype::F32);
    assert_eq!(
        load_model(&dir.0).unwrap_err().to_string(),
        "tensor model.layers.0.mlp.gate_proj.weight has shape [24, 16], config.json implies [32, 16]"
    );
    write_config(&dir.0, false, json!({}));
    all.remove("lm_head.weight");
    write_tensors(&dir.0.join("model.safetensors"), &all, Dtype::F32);
    assert_eq!(load_model(&dir.0).unwrap_err().to_string(), "no file has the tensor lm_head.weight");
}

#[test]
fn a_tokenizer_file_turns_text_into_tokens_and_back() {
    let dir = Dir::new("tokenizer");
    let words = ["[UNK]", "a", "page", "of", "keys"];
    let vocab: BTreeMap<&str, usize> = words.iter().enumerate().map(|(i, word)| (*word, i)).collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" },
    });
    std::fs::write(dir.0.join("tokenizer.json"), file.to_string()).unwrap();
    let tokenizer = Tokenizer::load(&dir.0).unwrap();
    assert_eq!(tokenizer.encode("a page of keys").unwrap(), [1, 2, 3, 4]);
    assert_eq!(tokenizer.decode(&[2, 3]).unwrap(), "page of");
}
