(* Sums of vectors with factors: bounds from the largest eigenvalue of the sum of their outer products, or from a ball.
   Used in docs/soundness.md under "Coded attention". *)

Require Import Certk.sums Certk.total_variation.

Section Vectors.
Context {key entry : Type}.
Variable keys : list key.
Variable entries : list entry.

Definition dot (a b : entry -> R) := total entries (fun j => a j * b j).
Definition length_of (a : entry -> R) := norm entries a.

(* The sum of d_k v_k. *)
Definition combined (d : key -> R) (v : key -> entry -> R) (j : entry) := total keys (fun k => d k * v k j).

Lemma dot_self a : dot a a = length_of a * length_of a.
Proof. unfold length_of. now rewrite norm_squared. Qed.

Lemma dot_le a b : Rabs (dot a b) <= length_of a * length_of b.
Proof. apply cauchy_schwarz. Qed.

Lemma dot_combined d v z : dot (combined d v) z = total keys (fun k => d k * dot (v k) z).
Proof.
  unfold dot, combined.
  rewrite (total_ext entries _ (fun j => total keys (fun k => d k * v k j * z j))).
  - rewrite <- total_swap. apply total_ext. intros k _. rewrite <- total_times.
    apply total_ext. intros. ring.
  - intros j _. rewrite Rmult_comm, <- total_times. apply total_ext. intros. ring.
Qed.

(* A vector is no longer than its product with itself allows. *)
Lemma length_le a b : 0 <= b -> dot a a <= b * length_of a -> length_of a <= b.
Proof.
  intros B H. rewrite dot_self in H. pose proof (norm_nonneg entries a) as L. fold (length_of a) in L.
  destruct (Rle_lt_or_eq_dec 0 (length_of a)) as [P|P]; [easy | | lra]. nra.
Qed.

(* eigenvalue bounds those of the sum of v v^T, as a form. *)
Theorem eigenvalue_bound d v eigenvalue : 0 <= eigenvalue ->
  (forall y, total keys (fun k => dot (v k) y * dot (v k) y) <= eigenvalue * dot y y) ->
  length_of (combined d v) <= sqrt eigenvalue * norm keys d.
Proof.
  intros E H. set (z := combined d v).
  assert (0 <= sqrt eigenvalue * norm keys d) by (apply Rmult_le_pos; [apply sqrt_pos | apply norm_nonneg]).
  apply length_le; [easy|]. unfold z at 1. rewrite dot_combined. fold z.
  eapply Rle_trans; [apply Rle_abs|]. eapply Rle_trans; [apply cauchy_schwarz|]. fold (norm keys d).
  assert (sqrt (total keys (fun k => dot (v k) z * dot (v k) z)) <= sqrt eigenvalue * length_of z).
  { pose proof (norm_nonneg entries z) as L. fold (length_of z) in L.
    rewrite <- (sqrt_square (length_of z)) by easy. rewrite <- sqrt_mult by (easy || apply square_nonneg).
    apply sqrt_le_1_alt. rewrite <- dot_self. apply H. }
  pose proof (norm_nonneg keys d). nra.
Qed.

(* Vectors of at most this length. *)
Lemma longest_bound d v longest : (forall k, In k keys -> length_of (v k) <= longest) -> 0 <= longest ->
  length_of (combined d v) <= total keys (fun k => Rabs (d k)) * longest.
Proof.
  intros H P. set (z := combined d v).
  assert (0 <= total keys (fun k => Rabs (d k))) by (apply total_nonneg; intros; apply Rabs_pos).
  apply length_le; [nra|]. unfold z at 1. rewrite dot_combined. fold z.
  eapply Rle_trans; [apply Rle_abs|]. eapply Rle_trans; [apply total_abs|].
  rewrite Rmult_assoc, Rmult_comm, <- total_times. apply total_le. intros k I.
  rewrite Rabs_mult, Rmult_comm. apply Rmult_le_compat_r; [apply Rabs_pos|].
  eapply Rle_trans; [apply dot_le|]. apply Rmult_le_compat_r; [apply norm_nonneg | auto].
Qed.

(* Averages over a ball with this centre differ by 2 R times the total variation distance of their shares. *)
Lemma ball_bound p q v centre radius :
  total keys p = total keys q ->
  (forall k, In k keys -> length_of (fun j => v k j - centre j) <= radius) -> 0 <= radius ->
  length_of (fun j => combined p v j - combined q v j) <= 2 * radius * distance keys p q.
Proof.
  intros E H P.
  replace (2 * radius * distance keys p q) with (total keys (fun k => Rabs (p k - q k)) * radius)
    by (unfold distance; field).
  eapply Rle_trans; [|apply (longest_bound _ _ radius H P)]. apply Req_le.
  unfold length_of, norm. f_equal. apply total_ext. intros j _.
  assert (combined p v j - combined q v j = combined (fun k => p k - q k) (fun k j => v k j - centre j) j) as ->;
    [|reflexivity].
  unfold combined. rewrite <- total_minus.
  rewrite (total_ext _ (fun k => (p k - q k) * (v k j - centre j))
    (fun k => (p k * v k j - q k * v k j) - centre j * (p k - q k))) by (intros; ring).
  rewrite (total_minus _ _ (fun k => centre j * (p k - q k))), (total_times _ (centre j)), (total_minus _ p q), E.
  ring.
Qed.
End Vectors.
